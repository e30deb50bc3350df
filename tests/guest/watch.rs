//! The `watch` example, as scripts use it.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::support::{eventually, example, ms, run};

/// Runs `watch`; its lines of JSON, the ledger last.
#[track_caller]
fn watch(arguments: &str) -> (Vec<Value>, Value) {
    let text = run(&format!("{} --json {arguments}", example("watch").display()));
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let last = lines.pop().expect("a ledger");
    let ledger = last.get("ledger").unwrap_or_else(|| panic!("{last}")).clone();
    (lines, ledger)
}

/// 20,000 datagrams are 20,000 lines, and the ledger says so.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn twenty_thousand_lines() {
    let (events, ledger) = watch("--function ip_rcv --traffic udp:20000");
    assert_eq!(events.len(), 20_000);
    let account = &ledger["ip_rcv"];
    for counter in ["started", "completed", "delivered"] {
        assert_eq!(account[counter], 20_000, "{counter}: {account}");
    }
    for counter in ["ring_dropped", "channel_dropped", "untracked", "unmatched", "mismatched", "missed", "open"] {
        assert_eq!(account[counter], 0, "{counter}: {account}");
    }
    for event in &events {
        for field in ["latency_ns", "start_ns", "pid", "tid", "cpu_start", "cpu_end", "skb", "len"] {
            assert!(event[field].is_u64(), "{field}: {event}");
        }
        assert_eq!(event["span"], "ip_rcv");
        assert_eq!(event["ret"], 0);
        assert!(event["comm"].is_string());
    }
    // Some may be left to ksoftirqd.
    assert!(events.iter().any(|event| event["comm"] == "watch"));
}

/// TCP traffic, several functions, void and no packet: what isn't there is null.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn several_functions() {
    let (events, ledger) = watch("--function tcp_sendmsg tcp_v4_rcv --function sock_def_readable --traffic tcp:100");
    for name in ["tcp_sendmsg", "tcp_v4_rcv", "sock_def_readable"] {
        let own: Vec<_> = events.iter().filter(|event| event["span"] == name).collect();
        assert!(own.len() >= 100, "{name}: {}", own.len());
        assert_eq!(ledger[name]["delivered"], own.len() as u64);
        assert!(own.iter().all(|event| event["ret"].is_null() == (name == "sock_def_readable")), "{name}");
        assert!(own.iter().all(|event| event["skb"].is_null() == (name != "tcp_v4_rcv")), "{name}");
    }
}

/// `--count` ends after so many, `--duration` after that time, and neither loses the ledger.
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

/// The table is for people; the ledger stands below it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn table() {
    let text = run(&format!("{} --function ip_rcv --traffic udp:3", example("watch").display()));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 6, "{text}");
    assert!(lines[0].starts_with("SPAN") && lines[1].starts_with("ip_rcv "), "{text}");
    assert_eq!(lines[5], "ip_rcv: started 3 completed 3 delivered 3");
}

/// Ctrl-C and SIGTERM's sibling in scripts end it cleanly: what was seen, the ledger, and status 0.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn interrupted() {
    let mut child = Command::new(example("watch"))
        .args(["--json", "--function", "ip_rcv"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert_eq!(line, "attached\n");
    crate::support::ping_pong(&crate::support::udp_to_itself(), 5, b"x");
    run(&format!("kill -INT {}", child.id()));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), 6, "{text}");
    assert!(text.lines().last().unwrap().contains(r#""ledger""#), "{text}");
}

/// Killed without a chance to detach, it still leaves nothing attached.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn killed() {
    let programs = || libbpf_rs::query::ProgInfoIter::default().count();
    let before = programs();
    let mut child = Command::new(example("watch"))
        .args(["--function", "ip_rcv"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "attached\n");
    assert!(programs() > before);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("its programs are gone", || programs() == before);
}

/// Its reader goes away (`watch | head`): an error, not a panic.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn broken_pipe() {
    let watch = example("watch");
    let text = run(&format!("{} --function ip_rcv --traffic udp:5000 2>&1 >/dev/full; echo $?", watch.display()));
    assert!(text.starts_with("attached\nwatch: ") && text.ends_with("2\n") && !text.contains("panicked"), "{text}");
}

/// The quick start shows ten calls and the ledger.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn quickstart() {
    let text = run(&example("quickstart").display().to_string());
    assert_eq!(text.lines().filter(|line| line.starts_with("ip_rcv ")).count(), 10, "{text}");
    assert_eq!(text.lines().last(), Some("ip_rcv: started 10 completed 10 delivered 10"), "{text}");
}
