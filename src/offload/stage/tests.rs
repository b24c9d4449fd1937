//! Stages with fake work.
