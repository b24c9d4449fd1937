//! Finds the libaio functions that the loaded programs and libraries call, from their dynamic relocations.
//!
//! Some programs submit requests with libaio and fetch the events without it: qemu reads the kernel's event ring at the
//! context's address, and MariaDB calls io_getevents by `syscall`. Neither finds the events of a context of this
//! library. Such a program imports `io_submit` and none of the functions that fetch events.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::slice;

use libc::{Elf64_Rela, Elf64_Sym, dl_phdr_info, size_t};

const FETCHING: [&CStr; 3] = [c"io_getevents", c"io_pgetevents", c"io_queue_run"];

const DT_NULL: u64 = 0;
const DT_PLTRELSZ: u64 = 2;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_RELA: u64 = 7;
const DT_RELASZ: u64 = 8;
const DT_JMPREL: u64 = 23;

/// The first loaded object that submits requests and fetches no events; an empty name means the program itself.
pub fn fetches_elsewhere() -> Option<String> {
    let mut found: Option<String> = None;
    // SAFETY: the callback has this signature, and its last argument is a local that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look_at), (&raw mut found).cast()) };
    found
}

/// Stops the iteration at the first object found.
unsafe extern "C" fn look_at(info: *mut dl_phdr_info, _: size_t, found: *mut c_void) -> c_int {
    // SAFETY: the loader passes a record of a loaded object, whose tables stay mapped during the call.
    let imports = unsafe { Imports::of(&*info) };
    if !imports.submits || imports.fetches {
        return 0;
    }
    // SAFETY: `fetches_elsewhere` passes this pointer; the loader's name is NULL or ends with NUL.
    unsafe {
        let name = (*info).dlpi_name;
        let name = if name.is_null() { c"" } else { CStr::from_ptr(name) };
        *found.cast::<Option<String>>() = Some(name.to_string_lossy().into_owned());
    }
    1
}

#[derive(Default)]
struct Imports {
    submits: bool,
    fetches: bool,
}

/// The addresses of an object's tables, and their sizes in bytes.
#[derive(Default)]
struct Tables {
    strings: usize,
    symbols: usize,
    relocations: [(usize, usize); 2],
}

impl Imports {
    /// # Safety
    /// The object is loaded and stays loaded during the call.
    unsafe fn of(info: &dl_phdr_info) -> Imports {
        let mut imports = Imports::default();
        // SAFETY: as the caller guarantees.
        let Some(tables) = (unsafe { Tables::of(info) }) else { return imports };
        for (address, bytes) in tables.relocations {
            if address == 0 {
                continue;
            }
            // SAFETY: the object's own table, with the length that the object states.
            let all = unsafe {
                slice::from_raw_parts(address as *const Elf64_Rela, bytes / size_of::<Elf64_Rela>())
            };
            for relocation in all {
                let symbol = (relocation.r_info >> 32) as usize;
                if symbol == 0 {
                    continue;
                }
                // SAFETY: the table of symbols contains every symbol that the object refers to, and the table of
                // strings its name.
                let name = unsafe {
                    let symbol = &*(tables.symbols as *const Elf64_Sym).add(symbol);
                    CStr::from_ptr((tables.strings as *const c_char).add(symbol.st_name as usize))
                };
                imports.submits |= name == c"io_submit";
                imports.fetches |= FETCHING.contains(&name);
            }
        }
        imports
    }
}

impl Tables {
    /// # Safety
    /// The object is loaded and stays loaded during the call.
    unsafe fn of(info: &dl_phdr_info) -> Option<Tables> {
        if info.dlpi_phdr.is_null() {
            return None;
        }
        // SAFETY: the loader provides the array and its length.
        let headers = unsafe { slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum)) };
        let dynamic = headers.iter().find(|header| header.p_type == libc::PT_DYNAMIC)?;
        let base = info.dlpi_addr as usize;
        // The loader writes addresses into the table. In an object that is not relocated they are offsets.
        let place = |value: u64| if (value as usize) < base { base + value as usize } else { value as usize };
        let mut tables = Tables::default();
        let mut entry = (base + dynamic.p_vaddr as usize) as *const [u64; 2];
        loop {
            // SAFETY: the table ends with DT_NULL.
            let [tag, value] = unsafe { *entry };
            match tag {
                DT_NULL => break,
                DT_STRTAB => tables.strings = place(value),
                DT_SYMTAB => tables.symbols = place(value),
                DT_RELA => tables.relocations[0].0 = place(value),
                DT_RELASZ => tables.relocations[0].1 = value as usize,
                DT_JMPREL => tables.relocations[1].0 = place(value),
                DT_PLTRELSZ => tables.relocations[1].1 = value as usize,
                _ => {}
            }
            // SAFETY: the entry was not the last one.
            entry = unsafe { entry.add(1) };
        }
        (tables.strings != 0 && tables.symbols != 0).then_some(tables)
    }
}
