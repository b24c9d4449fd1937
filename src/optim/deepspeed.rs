//! The optimizer ids of DeepSpeed's Adam, and the f32 state of each id. Its Adagrad and Lion keep no state: each call passes
//! all options.
//!
//! Invariants:
//! - The map is the only registry of the process. A change replaces the whole map atomically and takes no lock, so a
//!   forked child never sees a half-changed map. A call works on its own copy of the state.
//! - The powers of beta are f32 and advance as in DeepSpeed. The next step multiplies them, and the same step keeps
//!   them. Any other step, or a change of a beta, computes them from scratch.
//! - One id serves all parameters of an optimizer.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::adam::power;
use super::check;
use crate::error::{Error, Result};
use crate::kernel::{AdamRule, WeightDecay};

/// The state that DeepSpeed keeps for one Adam id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamState {
    /// DeepSpeed's adamw_mode: weight decay scales the parameter.
    pub decoupled: bool,
    /// Number of the last step; 0 before the first.
    pub step: u64,
    /// Decay of exp_avg in the last step.
    pub beta1: f32,
    /// Decay of exp_avg_sq in the last step.
    pub beta2: f32,
    /// The power of beta1 that the last step used.
    pub beta1_power: f32,
    /// The power of beta2 that the last step used.
    pub beta2_power: f32,
}

/// Arguments of a call to DeepSpeed's `adam_update`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamCall {
    /// Number of this step, from 1.
    pub step: u64,
    /// Learning rate.
    pub lr: f32,
    /// Decay of exp_avg.
    pub beta1: f32,
    /// Decay of exp_avg_sq.
    pub beta2: f32,
    /// Added to the denominator.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Divide the moments by 1 - beta^t.
    pub bias_correction: bool,
}

impl AdamState {
    /// The state of a new id. `decoupled` is DeepSpeed's adamw_mode. Fails for a beta outside [0, 1).
    pub fn new(decoupled: bool, beta1: f32, beta2: f32) -> Result<Self> {
        check::beta("beta1", beta1.into())?;
        check::beta("beta2", beta2.into())?;
        Ok(AdamState { decoupled, step: 0, beta1, beta2, beta1_power: 1.0, beta2_power: 1.0 })
    }

    /// Checks a state that was saved elsewhere. Fails for a beta outside [0, 1) or a power outside [0, 1].
    pub fn restored(self) -> Result<Self> {
        AdamState::new(self.decoupled, self.beta1, self.beta2)?;
        for (name, power) in [("beta1_power", self.beta1_power), ("beta2_power", self.beta2_power)] {
            if !(0.0..=1.0).contains(&power) {
                return Err(Error::invalid(name, format!("{power} is not between 0 and 1")));
            }
        }
        Ok(self)
    }

    /// Returns the state for the step of `call` and the coefficients of that step. Fails for an option out of range.
    pub fn begin(self, call: &AdamCall) -> Result<(AdamState, AdamRule)> {
        check::step(call.step)?;
        check::finite("lr", call.lr.into())?;
        check::beta("beta1", call.beta1.into())?;
        check::beta("beta2", call.beta2.into())?;
        check::eps(call.eps.into())?;
        check::not_negative("weight_decay", call.weight_decay.into())?;
        let state = self.advance(call.step, call.beta1, call.beta2);
        Ok((state, state.rule(call)))
    }

    fn advance(self, step: u64, beta1: f32, beta2: f32) -> Self {
        let same_betas = beta1 == self.beta1 && beta2 == self.beta2;
        if same_betas && step == self.step {
            return self;
        }
        let (beta1_power, beta2_power) = if same_betas && Some(step) == self.step.checked_add(1) {
            (self.beta1_power * beta1, self.beta2_power * beta2)
        } else {
            (power(f64::from(beta1), step) as f32, power(f64::from(beta2), step) as f32)
        };
        AdamState { step, beta1, beta2, beta1_power, beta2_power, ..self }
    }

    /// The coefficients as DeepSpeed computes them: every operation in f32.
    fn rule(&self, call: &AdamCall) -> AdamRule {
        let (correction1, inv_sqrt_correction2) = match call.bias_correction {
            true => (1.0 - self.beta1_power, 1.0 / (1.0 - self.beta2_power).sqrt()),
            false => (1.0, 1.0),
        };
        let (decay, decay_factor) = match (call.weight_decay > 0.0, self.decoupled) {
            (false, _) => (WeightDecay::None, 0.0),
            (true, true) => (WeightDecay::Decoupled, -call.lr * call.weight_decay),
            (true, false) => (WeightDecay::L2, call.weight_decay),
        };
        AdamRule {
            decay,
            grad_scale: 1.0,
            beta1: call.beta1,
            one_minus_beta1: 1.0 - call.beta1,
            beta2: call.beta2,
            one_minus_beta2: 1.0 - call.beta2,
            inv_sqrt_correction2,
            eps: call.eps,
            step_size: -call.lr / correction1,
            decay_factor,
            stochastic: None,
        }
    }
}

/// A thread-safe map from ids to states.
pub struct Ids(ArcSwapOption<HashMap<i32, AdamState>>);

/// Ids of `create_adam`.
pub static ADAM: Ids = Ids::new();

impl Ids {
    const fn new() -> Self {
        Ids(ArcSwapOption::const_empty())
    }

    /// Creates the id, or replaces its state.
    pub fn create(&self, id: i32, state: AdamState) {
        self.change(|map| {
            map.insert(id, state);
        });
    }

    /// Removes the id. Fails if the id does not exist.
    pub fn destroy(&self, id: i32) -> Result<()> {
        self.get(id)?;
        self.change(|map| {
            map.remove(&id);
        });
        Ok(())
    }

    /// Returns a copy of the state of the id. Fails if the id does not exist.
    pub fn get(&self, id: i32) -> Result<AdamState> {
        let map = self.0.load();
        let state = map.as_ref().and_then(|map| map.get(&id)).copied();
        state.ok_or(Error::UnknownId(id))
    }

    fn change(&self, change: impl Fn(&mut HashMap<i32, AdamState>)) {
        self.0.rcu(|map| {
            let mut next = map.as_ref().map(|map| HashMap::clone(map)).unwrap_or_default();
            change(&mut next);
            Some(Arc::new(next))
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(step: u64) -> AdamCall {
        AdamCall {
            step,
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
            bias_correction: true,
        }
    }

    #[test]
    fn powers_multiply_on_the_next_step_and_are_computed_anew_after_a_jump() {
        let start = AdamState::new(true, 0.9, 0.999).unwrap();
        let two = start.advance(1, 0.9, 0.999).advance(2, 0.9, 0.999);
        assert_eq!(two.beta1_power, 0.9f32 * 0.9f32);
        assert_eq!(two.advance(2, 0.9, 0.999), two);
        assert_eq!(two.advance(7, 0.9, 0.999).beta1_power, f64::from(0.9f32).powi(7) as f32);
        assert_eq!(two.advance(3, 0.8, 0.999).beta2_power, f64::from(0.999f32).powi(3) as f32);
    }

    #[test]
    fn a_state_goes_on_where_it_was_kept_and_an_impossible_one_is_refused() {
        let start = AdamState::new(true, 0.9, 0.999).unwrap();
        let many = (1..=20).fold(start, |state, step| state.begin(&call(step)).unwrap().0);
        assert_eq!(many.restored().unwrap().begin(&call(21)), many.begin(&call(21)));
        assert_ne!(start.begin(&call(21)).unwrap().0, many.begin(&call(21)).unwrap().0);
        for power in [f32::NAN, -0.1, 1.5] {
            assert!(AdamState { beta2_power: power, ..many }.restored().is_err());
        }
        assert!(AdamState { beta1: 1.0, ..many }.restored().is_err());
    }

    #[test]
    fn ids_live_from_create_to_destroy() {
        let ids = Ids::new();
        assert_eq!(ids.get(7), Err(Error::UnknownId(7)));
        ids.create(7, AdamState::new(true, 0.9, 0.999).unwrap());
        assert!(ids.get(7).unwrap().begin(&call(1)).is_ok());
        assert!(ids.get(7).unwrap().begin(&call(0)).is_err());
        ids.destroy(7).unwrap();
        assert!(ids.destroy(7).is_err() && ids.get(7).is_err());
    }

    #[test]
    fn ids_of_several_threads_do_not_disturb_each_other() {
        let ids = Ids::new();
        std::thread::scope(|scope| {
            for id in 0..8 {
                let ids = &ids;
                scope.spawn(move || {
                    ids.create(id, AdamState::new(true, 0.9, 0.999).unwrap());
                    for step in 1..200 {
                        let (state, _) = ids.get(id).unwrap().begin(&call(step)).unwrap();
                        ids.create(id, state);
                    }
                });
            }
        });
        for id in 0..8 {
            assert_eq!(ids.get(id).unwrap().step, 199);
        }
    }
}
