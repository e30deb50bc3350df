//! What the examples print and how they end, where the kernel makes no difference: the oldest and the newest run this.

use std::time::Instant;

use dwell::Stage;
use serde_json::Value;

use crate::support::{example, ms, run, shell};
use crate::watch::watch;

/// `watch --count` ends after so many, `--duration` after that time, and neither loses the ledger.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn count_and_duration() {
    let (events, ledger) = watch("--function ip_rcv --traffic udp:100 --count 7");
    assert_eq!(events.len(), 7);
    assert!(ledger["ip_rcv"]["delivered"].as_u64() >= Some(7), "{ledger}");

    let before = Instant::now();
    let (events, ledger) = watch("--function ip_rcv --duration 0.5");
    assert!(before.elapsed() >= ms(500));
    assert!(events.is_empty());
    assert_eq!(ledger["ip_rcv"]["started"], 0, "{ledger}");
}

/// The table of `watch` is for people; the ledger stands below it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn table() {
    let text = run(&format!("{} --function ip_rcv --traffic udp:3", example("watch").display()));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    assert!(lines[0].starts_with("SPAN") && lines[1].starts_with("ip_rcv "), "{text}");
    assert_eq!(lines[5], "ip_rcv: started 3 completed 3 delivered 3");
}

/// The reader goes away (`watch | head`): an error, not a panic.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn broken_pipe() {
    let watch = example("watch");
    let text = run(&format!("{} --function ip_rcv --traffic udp:5000 2>&1 >/dev/full; echo $?", watch.display()));
    assert!(text.starts_with("attached\nwatch: ") && text.ends_with("2\n") && !text.contains("panicked"), "{text}");
}

/// The list of stages needs no privileges: each with what this kernel has, or why not.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn list_stages() {
    let watch = example("watch");
    let text = run(&format!("setpriv --reuid 65534 --clear-groups {} --list-stages", watch.display()));
    for stage in Stage::ALL {
        assert!(
            text.lines().any(|line| line.starts_with(stage.name()) && line.ends_with(stage.description())),
            "{text}"
        );
    }
    let tracepoints = "\n    tp:net_dev_queue → tp:net_dev_start_xmit by skb\n";
    assert!(text.contains(tracepoints) && text.contains("\n    calls of udp_rcv, udpv6_rcv\n"), "{text}");
    let lines = run(&format!("{} --list-stages --json", watch.display()));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    assert_eq!(lines.len(), Stage::ALL.len());
    assert!(lines.iter().all(|line| line["error"].is_string() != line["starts"].is_array()), "{lines:?}");
}

/// What this kernel doesn't have is an error on one line, and nothing else is printed.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn nothing_of_that_name() {
    let cases = [
        ("--span a..b", "this kernel has no function `a`; is its module loaded?"),
        (
            "--span tp:net_dev_queu..ip_rcv",
            "this kernel has no raw tracepoint `net_dev_queu`; did you mean `net_dev_queue`",
        ),
        ("--span ip_rcv..ip_list_rcv", "`ip_list_rcv` has no argument that is a packet"),
        ("--span ip_rcv..ip_rcv_core --key call", "a call goes from the entry of a function to the exit of the same"),
        ("--span ip_rcv..ip_rcv_core --max-age 0", "a maximal age of 0ns: more than 0"),
    ];
    for (arguments, text) in cases {
        let output = shell(&format!("{} {arguments}", example("watch").display()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.starts_with(&format!("watch: {text}")) && stderr.lines().count() == 1, "{arguments}: {stderr}");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments}");
    }
}

/// Where there is no classifier, `tc_ingress` says how to make one.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn tc_ingress_without_a_classifier() {
    let text = run(&example("tc_ingress").display().to_string());
    assert!(text.contains("tc filter add dev lo ingress"), "{text}");
    assert_eq!(text.lines().last(), Some("tc-ingress: started 0 completed 0 delivered 0"), "{text}");
}

/// Nothing to write to, and words that `doctor` doesn't know: neither looks like an answer.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn doctor_has_no_answer() {
    let doctor = example("doctor");
    for arguments in [">/dev/full", "--no-such-option"] {
        let output = shell(&format!("{} {arguments}", doctor.display()));
        assert_eq!(output.status.code(), Some(3), "{arguments}");
        assert!(!output.stderr.is_empty() && output.stdout.is_empty(), "{arguments}");
    }
}
