//! What the benchmarks of the traced path share.

#![allow(dead_code, reason = "not every benchmark needs all of it")]

pub mod instructions;
pub mod load;
pub mod own;
pub mod peer;
pub mod programs;
pub mod rows;
pub mod table;
