//! What a user of the crate meets on the machine that runs the test, whatever that is.
//!
//! Where its kernel allows fentry and the test runs as root, a probe attaches; else the error must say why not. Every
//! outcome that isn't an explained one fails.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use dwell::{ErrorKind, LatencyProbe};

/// These tests time what they do, and count what this process holds.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Attaching works or is refused for a reason, within a second, and nothing is printed.
#[test]
fn attaches_or_explains() {
    let _alone = ONE_AT_A_TIME.lock();
    let before = Instant::now();
    let result = LatencyProbe::builder().function("ip_rcv").attach();
    let took = before.elapsed();
    assert!(took < Duration::from_secs(1), "it took {took:?}");
    match result {
        Ok(probe) => {
            println!("this kernel allows fentry");
            assert!(probe.stop().is_balanced());
        }
        Err(error) => {
            println!("{error}");
            match error.kind() {
                ErrorKind::TracingRefused { errno, .. } => assert!([1, 524].contains(errno), "{error}"),
                ErrorKind::NoPrivilege { missing, .. } => assert!(!missing.is_empty(), "{error}"),
                ErrorKind::NoBtf { .. } => {}
                // What keeps a process from system calls answers the same.
                ErrorKind::System { errno: 1, .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

/// A misspelt name is found out before the kernel is asked to load anything, and quickly.
#[test]
fn unknown_function() {
    let _alone = ONE_AT_A_TIME.lock();
    let before = Instant::now();
    let error = LatencyProbe::builder().function("ip_rcv").function("no_such_function").attach().unwrap_err();
    let took = before.elapsed();
    assert!(took < Duration::from_secs(1), "it took {took:?}");
    match error.kind() {
        ErrorKind::UnknownFunction { function, .. } => assert_eq!(function, "no_such_function"),
        ErrorKind::NoPrivilege { .. } | ErrorKind::NoBtf { .. } => println!("{error}"),
        other => panic!("{other:?}"),
    }
}

/// Failures leave no descriptor and no thread behind.
#[test]
fn failures_leave_nothing() {
    let _alone = ONE_AT_A_TIME.lock();
    let count = |path| std::fs::read_dir(path).expect("/proc is mounted").count();
    let fail = || {
        let _ = LatencyProbe::builder().function("ip_rcv").attach();
        let _ = LatencyProbe::builder().function("no_such_function").attach();
    };
    fail();
    let descriptors = count("/proc/self/fd");
    (0..20).for_each(|_| fail());
    assert_eq!(count("/proc/self/fd"), descriptors);
    let names = std::fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    let names: Vec<_> = names.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect();
    assert!(!names.iter().any(|name| name.starts_with("dwell-reader")), "{names:?}");
}
