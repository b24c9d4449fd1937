//! The open requests of one context, found by the number that each ring entry carries.
#![forbid(unsafe_code)]

use crate::request::Request;

/// The user data of entries without a request: notices to eventfds, cancellations, wake-ups.
pub const HIDDEN: u64 = u64::MAX;

/// Slots are reused; the generation in the upper half keeps a late completion from matching a new request.
pub struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    capacity: usize,
}

struct Slot {
    generation: u32,
    request: Option<Request>,
}

impl Table {
    /// An empty table, which allocates memory as requests arrive.
    pub fn new(capacity: usize) -> Table {
        Table { slots: Vec::new(), free: Vec::new(), capacity }
    }

    /// Number of requests that were submitted and not yet fetched.
    pub fn open(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub fn is_full(&self) -> bool {
        self.open() >= self.capacity
    }

    pub fn insert(&mut self, request: Request) -> u64 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, request: None });
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.request = Some(request);
        u64::from(slot.generation) << 32 | u64::from(index)
    }

    pub fn get_mut(&mut self, user_data: u64) -> Option<&mut Request> {
        let slot = self.slots.get_mut(user_data as u32 as usize)?;
        if u64::from(slot.generation) == user_data >> 32 { slot.request.as_mut() } else { None }
    }

    pub fn remove(&mut self, user_data: u64) -> Option<Request> {
        self.get_mut(user_data)?;
        let index = user_data as u32;
        let slot = &mut self.slots[index as usize];
        // The last generation would make HIDDEN a valid number.
        slot.generation = (slot.generation + 1) % u32::MAX;
        self.free.push(index);
        slot.request.take()
    }

    /// The numbers of all open requests that `wanted` selects.
    pub fn select(&self, wanted: impl Fn(&Request) -> bool) -> Vec<u64> {
        let numbered = self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let request = slot.request.as_ref()?;
            wanted(request).then_some(u64::from(slot.generation) << 32 | index as u64)
        });
        numbered.collect()
    }
}
