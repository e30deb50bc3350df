//! The `watch` example on the machine that runs the test, whatever that is.
//!
//! Run by a plain `cargo test`, which builds the examples as well.

use std::path::PathBuf;
use std::process::{Command, Output};

use dwell::Support;
use serde_json::Value;

const LOOPBACK: &str = "tp:net_dev_queue..tp:netif_receive_skb";

fn watch(arguments: &[&str]) -> Output {
    let this = std::env::current_exe().expect("/proc is mounted");
    let profile = this.ancestors().nth(2).expect("target/PROFILE/deps/TEST");
    let watch: PathBuf = profile.join("examples/watch");
    Command::new(&watch).args(arguments).output().unwrap_or_else(|error| panic!("{}: {error}", watch.display()))
}

/// Its error, on one line, and nothing else.
#[track_caller]
fn refused(output: &Output) -> String {
    let stderr = String::from_utf8(output.stderr.clone()).expect("UTF-8");
    assert_eq!((output.status.code(), output.stdout.len(), stderr.lines().count()), (Some(2), 0, 1), "{stderr}");
    stderr.strip_prefix("watch: ").unwrap_or_else(|| panic!("{stderr}")).trim_end().to_owned()
}

/// Packets can be followed by raw tracepoints, also where fentry is refused; where not even they work, it says why.
#[test]
fn packets_by_raw_tracepoints() {
    let output = watch(&["--json", "--span", LOOPBACK, "--traffic", "udp:10"]);
    if !Support::probe().can_trace_packets() {
        let error = refused(&output);
        println!("packets_by_raw_tracepoints: this machine doesn't allow raw tracepoints: {error}");
        assert!(["CAP_BPF", "refuses", "type information"].iter().any(|cause| error.contains(cause)), "{error}");
        return;
    }
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    let mut lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let ledger = lines.pop().expect("a ledger");
    // Others may use this machine's devices as well.
    let own: Vec<_> =
        lines.iter().filter(|event| event["comm"] == "watch" && event["outcome"] == "completed").collect();
    assert!(own.len() >= 10, "{stdout}");
    for event in own {
        assert_eq!(event["key"], format!("skb {:#x}", event["skb"].as_u64().expect("a packet")), "{event}");
        assert!(event["latency_ns"].as_u64() < Some(10_000_000_000), "{event}");
    }
    assert!(ledger["ledger"][LOOPBACK]["delivered"].as_u64() >= Some(10), "{ledger}");
}

/// Every stage is listed, whatever the machine allows.
#[test]
fn list_stages() {
    let output = watch(&["--list-stages"]);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let stdout = String::from_utf8(output.stdout).expect("UTF-8");
    for stage in dwell::Stage::ALL {
        assert!(stdout.lines().any(|line| line.starts_with(stage.name())), "{stage}: {stdout}");
    }
}

/// What can't be meant is an error on one line.
#[test]
fn nonsense() {
    let cases: [(&[&str], &str); 13] = [
        (&[], "the following required arguments were not provided"),
        (&["--json"], "the following required arguments were not provided"),
        (&["--span", "x"], "two hooks are needed, FROM..TO"),
        (&["--span", "a.."], "\"\" is not a function's name"),
        (&["--span", "tp:net:a..b"], "a raw tracepoint's name has no group"),
        (
            &["--span", "a..b", "--key", "tuple"],
            "`tuple` is no key: call, skb, skbhead, sock, flow, flow-reply, thread are",
        ),
        (&["--span", "a..b", "--max-age", "abc"], "invalid value 'abc' for '--max-age <DURATION>'"),
        (&["--span", "a..b", "--max-age", "5"], "time unit needed"),
        (&["--stage", "tc-ingres"], "`tc-ingres` is no stage; did you mean `tc-ingress`?"),
        (&["--stage", "x"], "`x` is no stage: napi-poll, "),
        (&["--list-stages", "--stage", "qdisc"], "cannot be used with '--stage <NAME>'"),
        (&["--function", "ip_rcv", "--count", "0"], "0 is not in 1.."),
        (&["--function", "ip_rcv", "--traffic", "icmp:3"], "`icmp` is neither udp nor tcp"),
    ];
    for (arguments, text) in cases {
        let error = refused(&watch(arguments));
        assert!(error.contains(text), "{arguments:?}: {error}");
    }
}
