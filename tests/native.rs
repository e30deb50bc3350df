//! What a user of the crate meets on the machine that runs the test, whatever that is.
//!
//! Where its kernel allows fentry and the test runs as root, a probe attaches; else the error must say why not. Every
//! outcome that isn't an explained one fails.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use dwell::{Answer, ErrorKind, Feature, LatencyProbe, Support};

/// These tests time what they do, and count what this process holds.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// It takes a fifth of a second, mostly to read kallsyms; this is for machines that are busy with other things.
const SOON: Duration = Duration::from_secs(3);

/// Attaching works or is refused for a reason, soon, and nothing is printed.
#[test]
fn attaches_or_explains() {
    let _alone = ONE_AT_A_TIME.lock();
    let before = Instant::now();
    let result = LatencyProbe::builder().function("ip_rcv").attach();
    let took = before.elapsed();
    assert!(took < SOON, "it took {took:?}");
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
    assert!(took < SOON, "it took {took:?}");
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

/// The report has an answer and a cause for everything, a remedy for what is needed and missing, leaves no descriptor,
/// and is right about what a probe meets.
#[test]
fn support_report() {
    let _alone = ONE_AT_A_TIME.lock();
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").count();
    let held = descriptors();
    let before = Instant::now();
    let support = Support::probe();
    let took = before.elapsed();
    println!("{support}");
    assert!(took < Duration::from_secs(2), "it took {took:?}");
    assert_eq!(descriptors(), held);
    assert_eq!(Support::probe(), support);
    assert!(!support.kernel().is_empty() && !support.architecture().is_empty());
    for check in support.checks() {
        assert_eq!(support.get(check.feature), Some(check));
        assert!(!check.cause.is_empty() && !check.cause.contains('\n'), "{check:?}");
        let needed = matches!(check.feature, Feature::Btf | Feature::Trampolines | Feature::RingBuffer);
        assert!(!needed || check.answer != Answer::No || check.remedy.is_some(), "{check:?}");
    }
    assert_eq!(support.can_trace_functions(), LatencyProbe::builder().function("ip_rcv").attach().is_ok());
}
