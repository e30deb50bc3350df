//! The `watch` example, as scripts use it.

use std::io::{BufRead as _, BufReader};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::{bpf_objects, example, kernel_version, ping_pong, run, shell, udp_to_itself, until_bpf_is_gone};

/// From a device's queue to its reception.
const LOOPBACK: &str = "tp:net_dev_queue..tp:netif_receive_skb";

/// Runs `watch`; its lines of JSON, the ledger last.
#[track_caller]
pub fn watch(arguments: &str) -> (Vec<Value>, Value) {
    parse(&run(&format!("{} --json {arguments}", example("watch").display())))
}

#[track_caller]
fn parse(text: &str) -> (Vec<Value>, Value) {
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let last = lines.pop().expect("a ledger");
    let ledger = last.get("ledger").unwrap_or_else(|| panic!("{last}")).clone();
    (lines, ledger)
}

/// Starts `watch`, and returns once it is attached.
fn start(arguments: &[&str]) -> Child {
    let mut command = Command::new(example("watch"));
    let mut child = command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "attached\n");
    child
}

/// Ends it as Ctrl-C does; what it printed.
fn interrupt(child: Child) -> String {
    run(&format!("kill -INT {}", child.id()));
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{:?}", output.status);
    String::from_utf8(output.stdout).unwrap()
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

/// Ctrl-C and SIGTERM's sibling in scripts end it cleanly: what was seen, the ledger, and status 0.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn interrupted() {
    let child = start(&["--json", "--function", "ip_rcv"]);
    ping_pong(&udp_to_itself(), 5, b"x");
    let (events, ledger) = parse(&interrupt(child));
    assert_eq!((events.len(), &ledger["ip_rcv"]["delivered"]), (5, &5.into()));
}

/// Killed without a chance to detach, it still leaves nothing attached.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn killed() {
    until_bpf_is_gone();
    let mut child = start(&["--function", "ip_rcv"]);
    let [programs, maps, links] = bpf_objects();
    assert!(programs > 0 && maps > 0 && links > 0, "{programs} programs, {maps} maps, {links} links");
    child.kill().unwrap();
    child.wait().unwrap();
    until_bpf_is_gone();
}

/// A span between hooks: its key, where it ended and how, and all counters of the ledger.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn span() {
    let (events, ledger) = watch(&format!("--span {LOOPBACK} --traffic udp:50"));
    assert_eq!(events.len(), 50);
    for event in &events {
        let key = format!("skb {:#x}", event["skb"].as_u64().unwrap());
        assert_eq!((&event["span"], &event["key"]), (&LOOPBACK.into(), &key.into()), "{event}");
        assert_eq!((&event["ended_at"], &event["outcome"]), (&"tp:netif_receive_skb".into(), &"completed".into()));
        assert!(event["reason"].is_null() && event["dropped_by"].is_null() && event["ret"].is_null(), "{event}");
    }
    for counter in ["abandoned", "expired", "overwritten", "unkeyed", "unmatched", "missed_releases"] {
        assert_eq!(ledger[LOOPBACK][counter], 0, "{counter}: {ledger}");
    }
}

/// A flow as a key reads like one, and several hooks are alternatives.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn keys() {
    let span = "tp:net_dev_queue..ip_rcv_core+ip6_rcv_core";
    let (events, _) = watch(&format!("--span {span} --key flow --traffic udp:5"));
    assert_eq!(events.len(), 5);
    for event in &events {
        let key = event["key"].as_str().unwrap();
        assert!(key.starts_with("udp 127.0.0.1:") && key.contains(" > 127.0.0.1:"), "{event}");
        assert_eq!((&event["span"], &event["ended_at"]), (&span.into(), &"ip_rcv_core".into()));
    }
    let (events, _) = watch("--span ip_rcv..ip_rcv:exit --key call --traffic udp:5");
    assert_eq!(events.len(), 5);
    assert!(events.iter().all(|event| event["key"] == "call"), "{events:?}");
}

/// Datagrams that nobody wants are events as well, if asked for, with the kernel's reason where it has one.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn abandoned() {
    const SPAN: &str = "tp:netif_receive_skb..udp_queue_rcv_one_skb";
    let unwanted = || {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let nobody = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        socket.send_to(b"hello", nobody).unwrap();
    };
    let child = start(&["--json", "--abandoned", "--span", SPAN]);
    unwanted();
    let (events, ledger) = parse(&interrupt(child));
    let dropped = events.iter().find(|event| event["outcome"] == "dropped" && event["len"] == 33);
    let dropped = dropped.unwrap_or_else(|| panic!("{events:?}"));
    let reason = if kernel_version() < (5, 17) { Value::Null } else { "NO_SOCKET".into() };
    assert_eq!(dropped["reason"], reason, "{dropped}");
    // Since 7.0 the one is part of the other.
    let function = if kernel_version() < (7, 0) { "__udp4_lib_rcv" } else { "udp_rcv" };
    assert_eq!(dropped["dropped_by"], function, "{dropped}");
    assert_eq!((&ledger[SPAN]["completed"], &ledger[SPAN]["emitted"]), (&0.into(), &ledger[SPAN]["abandoned"]));

    let child = start(&["--abandoned", "--span", SPAN]);
    unwanted();
    let table = interrupt(child);
    assert!(
        table.lines().next().unwrap().ends_with("OUTCOME") && table.contains(&format!(" in {function}\n")),
        "{table}"
    );
}

/// The slowest, also where nothing becomes an event.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn slowest() {
    let (lines, ledger) = watch("--function ip_rcv udp_sendmsg --no-events --slowest 3 --traffic udp:20");
    assert_eq!(ledger["ip_rcv"]["delivered"], 0);
    for span in ["ip_rcv", "udp_sendmsg"] {
        let slowest = lines.iter().map(|line| &line["slowest"]).filter(|event| event["span"] == span);
        let latencies: Vec<u64> = slowest.map(|event| event["latency_ns"].as_u64().unwrap()).collect();
        assert!(latencies.len() == 3 && latencies.is_sorted_by(|one, next| one >= next), "{lines:?}");
    }
    assert_eq!(lines.len(), 6);
    let table =
        run(&format!("{} --function ip_rcv --no-events --slowest 2 --traffic udp:20", example("watch").display()));
    assert!(table.starts_with("SPAN ") && table.lines().nth(2).unwrap().starts_with("ip_rcv "), "{table}");
    assert!(table.lines().nth(3).unwrap().is_empty(), "{table}");
}

/// What is too old is no event.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn max_age() {
    let (events, ledger) = watch(&format!("--span {LOOPBACK} --max-age 1ns --traffic udp:5"));
    assert!(events.is_empty(), "{events:?}");
    assert_eq!((&ledger[LOOPBACK]["started"], &ledger[LOOPBACK]["expired"]), (&5.into(), &5.into()));
    let (events, _) = watch(&format!("--span {LOOPBACK} --max-age 2m --traffic udp:5"));
    assert_eq!(events.len(), 5);
}

/// Stages by their names, and beside them what can't be measured, with the reason.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stages() {
    let (events, _) = watch("--stage qdisc --stage udp-receive --traffic udp:20");
    for (stage, end) in [("qdisc", "tp:net_dev_start_xmit"), ("udp-receive", "udp_rcv")] {
        let own: Vec<_> = events.iter().filter(|event| event["span"] == stage).collect();
        assert!(own.len() == 20 && own.iter().all(|event| event["ended_at"] == end), "{stage}: {own:?}");
    }
    let command =
        format!("{} --best-effort --stage qdisc --function no_such --traffic udp:3", example("watch").display());
    let output = shell(&command);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    let missing = "watch: no_such: this kernel has no function `no_such`";
    assert!(stderr.starts_with(missing) && stderr.ends_with("\nattached\n"), "{stderr}");
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
}
