//! What only a kernel that allows fentry can show. `tests/README.md` says which test covers what.
//!
//! Every test here is ignored by a plain `cargo test`, and named as ignored; `scripts/test` runs them all in guests, on
//! each supported kernel, where none may be left out: what a kernel lacks is a test's expectation there, not its
//! excuse.

mod arguments;
mod balance;
mod delivery;
mod doctor;
mod environment;
mod errors;
mod exactness;
mod examples;
mod filters;
mod histograms;
mod identity;
mod interference;
mod lab;
mod lab_selftest;
mod ledger;
mod lifecycle;
mod loads;
mod match_table;
#[path = "../mix/mod.rs"]
mod mix;
mod output;
mod packets;
mod packets_selftest;
#[cfg(feature = "pcap")]
mod pcap;
mod privileges;
mod raw;
mod sessions;
mod slowest;
mod spans;
mod stages;
mod stories;
mod support;
mod trampolines;
mod unharmed;
mod watch;
