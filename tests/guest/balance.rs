//! Whatever is asked for, whatever the traffic, and however it is read: the ledgers add up.

use std::time::Duration;

use crate::mix::{Hooks, rounds};

/// Random rounds for a while.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn always() {
    let hooks = Hooks::here().expect("a guest's kernel allows it");
    assert!(hooks == Hooks::All);
    rounds(1, Duration::from_secs(30), hooks);
}
