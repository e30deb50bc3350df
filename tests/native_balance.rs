//! Whatever is asked for, whatever the traffic, and however it is read: the ledgers add up. On the machine that runs the
//! test: by raw tracepoints, which work also where its kernel refuses fentry. Where it refuses these as well, or the test
//! doesn't run as root, it says so by name.

mod mix;

use std::time::Duration;

use mix::{Hooks, rounds};

/// Random rounds for a while.
#[test]
fn always() {
    match Hooks::here() {
        Ok(hooks) => drop(rounds(1, Duration::from_secs(10), hooks)),
        Err(support) => println!("always: not possible on this machine: {support}"),
    }
}
