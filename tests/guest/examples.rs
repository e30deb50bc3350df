//! The examples, run as a user does.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};

use crate::lab::{Ip, Lab, Side, send_datagrams};
use crate::support::{example, kernel_version, ms, ping_pong, run, udp_to_itself};

/// The quick start shows ten calls and the ledger.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn quickstart() {
    let text = run(&example("quickstart").display().to_string());
    assert_eq!(text.lines().filter(|line| line.starts_with("ip_rcv ")).count(), 10, "{text}");
    assert_eq!(text.lines().last(), Some("ip_rcv: started 10 completed 10 delivered 10"), "{text}");
}

/// There is a line for each second, and in the end all that was counted, which the ledger has, too.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn histogram() {
    let mut child = Command::new(example("histogram")).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    stdout.read_line(&mut text).unwrap();
    assert_eq!(text.split_whitespace().collect::<Vec<_>>(), ["CALLS", "P50", "P99", "MAX"]);
    ping_pong(&udp_to_itself(), 1_000, b"x");
    // Until they have been shown, in one second or in two.
    let mut shown = 0;
    while shown < 1_000 {
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        shown += line
            .split_whitespace()
            .next()
            .and_then(|calls| calls.parse::<u64>().ok())
            .unwrap_or_else(|| panic!("{line}"));
    }
    assert_eq!(shown, 1_000);
    run(&format!("kill -INT {}", child.id()));
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rest.contains("\nn 1000 mean ") && rest.contains("\n[  "), "{rest}");
    let ledger = "ip_rcv: started 1000 completed 1000 emitted 0 unsampled 1000 delivered 0";
    assert_eq!(rest.lines().last(), Some(ledger), "{rest}");
}

/// Each packet that meets a classifier has its line.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn tc_ingress() {
    let lab = Lab::new();
    lab.ingress_filter(Side::Right);
    let (left, right) = lab.udp_pair(Ip::V4);
    let mut child = Command::new(example("tc_ingress")).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    stdout.read_line(&mut text).unwrap();
    assert!(text.starts_with("tc-ingress: calls of "), "{text}");
    send_datagrams(&left, &right, 25, b"x");
    stdout.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 22, "{text}");
    assert!(lines[1..21].iter().all(|line| line.starts_with("tc-ingress ") && line.ends_with(" len 29")), "{text}");
    assert!(lines[21].starts_with("tc-ingress: started 2"), "{text}");
}

/// With thousands of rules the firewall comes first, not what is around it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_slow_firewall_is_to_blame() {
    let lab = Lab::new();
    lab.slow_firewall(Side::Right, 3_000);
    // A program starts on its parent's host.
    let text = lab.right(|| run(&format!("{} --messages 100", example("where_is_the_time").display())));
    // On 5.10 functions of modules can't be traced, and the rules are a part of their hook.
    let culprit = if kernel_version() < (5, 11) { "netfilter-local-in" } else { "firewall-rules" };
    assert!(text.starts_with(&format!("{culprit} takes most: ")), "{text}");
    let stage = |name: &str| text.lines().position(|line| line.starts_with(&format!("{name} ")) && !line.contains(':'));
    assert_eq!(stage(culprit), Some(3), "{text}");
    // 200 messages, the connection and its end, and acknowledgements.
    let count: u32 = text.lines().nth(3).and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap();
    assert!((200..600).contains(&count), "{text}");
    // All is within the poll, whose total is the largest, but it comes later.
    for name in ["napi-poll", "ip-receive", "tcp-receive", "udp-receive", "socket-queue", "qdisc"] {
        assert!(stage(name) > Some(3), "{name}: {text}");
    }
}

/// Packets that wait long for their reader have a story each, for people and as JSON; quick ones have none.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn slow_packets() {
    for json in [false, true] {
        let socket = udp_to_itself();
        let port = socket.local_addr().unwrap().port();
        let filter = format!("udp port {port}");
        let mut command = Command::new(example("slow_packets"));
        command.args(["--over", "300ms", "--stage", "socket-queue", "--count", "1", "--filter", &filter]);
        if json {
            command.arg("--json");
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        stderr.read_line(&mut line).unwrap();
        assert_eq!(line, "waiting for packets that take 300ms or longer\n");
        ping_pong(&socket, 100, b"x");
        socket.send(b"late").unwrap();
        std::thread::sleep(ms(400));
        socket.recv(&mut [0; 8]).unwrap();
        let (mut text, mut rest) = (String::new(), String::new());
        child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        stderr.read_to_string(&mut rest).unwrap();
        assert!(child.wait().unwrap().success());
        assert_eq!(rest, "1 story, of 101 ways through a stage\n");
        if json {
            let event: serde_json::Value = serde_json::from_str(&text).unwrap();
            assert!(event["latency_ns"].as_u64() >= Some(300_000_000), "{text}");
            assert_eq!(
                (&event["packet"]["destination_port"], &event["story"]["context"]),
                (&port.into(), &"task".into())
            );
            let stack = event["story"]["stack"].as_array().unwrap();
            assert!(stack.iter().any(|frame| frame.as_str().is_some_and(|frame| frame.starts_with("__sys_recvfrom+"))));
        } else {
            let lines: Vec<_> = text.lines().collect();
            assert!(lines[0].ends_with(" in socket-queue"), "{text}");
            let packet = format!("    packet   udp 127.0.0.1:{port} > 127.0.0.1:{port} netns ");
            assert!(lines[1].starts_with(&packet), "{text}");
            assert!(lines[2].contains(" on CPU ") && lines[2].contains(", by examples::slow_/"), "{text}");
            assert!(lines[3].starts_with("    stack    "), "{text}");
            assert!(lines.iter().any(|line| line.starts_with("             __sys_recvfrom+0x")), "{text}");
        }
    }
}
