//! The `watch` example on the machine that runs the test, whatever that is.
//!
//! Run by a plain `cargo test`, which builds the examples as well.

use std::path::PathBuf;
use std::process::{Command, Output};

use dwell::{Feature, Support};
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

/// What it prints about datagrams over loopback; `None` where raw tracepoints don't work, which it must explain.
#[track_caller]
fn loopback(test: &str, datagrams: u64, arguments: &[&str]) -> Option<String> {
    let traffic = format!("udp:{datagrams}");
    let output = watch(&[&["--span", LOOPBACK, "--traffic", &traffic], arguments].concat());
    if !Support::probe().can_trace_packets() {
        let error = refused(&output);
        println!("{test}: this machine doesn't allow raw tracepoints: {error}");
        assert!(["CAP_BPF", "refuses", "type information"].iter().any(|cause| error.contains(cause)), "{error}");
        return None;
    }
    assert!(output.status.success(), "{output:?}");
    Some(String::from_utf8(output.stdout).expect("UTF-8"))
}

/// Lines of JSON, and the ledger, which is the last.
fn parse(stdout: &str) -> (Vec<Value>, Value) {
    let mut lines: Vec<Value> = stdout.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let mut ledger = lines.pop().expect("a ledger");
    (lines, ledger["ledger"][LOOPBACK].take())
}

/// Packets can be followed by raw tracepoints, also where fentry is refused; where not even they work, it says why.
#[test]
fn packets_by_raw_tracepoints() {
    let Some(stdout) = loopback("packets_by_raw_tracepoints", 10, &["--json"]) else { return };
    let (lines, ledger) = parse(&stdout);
    // Others may use this machine's devices as well.
    let own: Vec<_> =
        lines.iter().filter(|event| event["comm"] == "watch" && event["outcome"] == "completed").collect();
    assert!(own.len() >= 10, "{stdout}");
    for event in own {
        assert_eq!(event["key"], format!("skb {:#x}", event["skb"].as_u64().expect("a packet")), "{event}");
        assert!(event["latency_ns"].as_u64() < Some(10_000_000_000), "{event}");
    }
    assert!(ledger["delivered"].as_u64() >= Some(10), "{ledger}");
}

/// Without events there are histograms and the ledger, and nothing else; quantiles, buckets and count are of the same.
#[test]
fn histogram() {
    let Some(stdout) = loopback("histogram", 1_000, &["--json", "--histogram", "--no-events"]) else { return };
    let (lines, ledger) = parse(&stdout);
    let [histogram] = &lines[..] else { panic!("{stdout}") };
    assert_eq!((&histogram["histogram"], &histogram["group"]), (&LOOPBACK.into(), &Value::Null));
    let number = |name: &str| histogram[name].as_u64().expect(name);
    assert!(number("count") >= 1_000, "{histogram}");
    // Others may send while it stops.
    assert!(number("count") <= ledger["completed"].as_u64().expect("a count"), "{ledger}");
    assert_eq!((&ledger["delivered"], &ledger["unsampled"]), (&0.into(), &ledger["completed"]), "{ledger}");
    let mean = number("mean_ns");
    assert_eq!(mean, number("sum_ns") / number("count"));
    let ascending: Vec<_> = ["0.5", "0.9", "0.99", "0.999"].map(|q| histogram["quantiles_ns"][q].as_u64()).into();
    assert!(ascending.is_sorted() && ascending[0] >= Some(number("min_ns")), "{histogram}");
    assert!(ascending[3] <= Some(number("max_ns")) && mean <= number("max_ns"), "{histogram}");
    let buckets = histogram["buckets"].as_array().expect("buckets");
    let in_buckets: u64 = buckets.iter().filter_map(|bucket| bucket["count"].as_u64()).sum();
    assert_eq!(in_buckets + number("overflow"), number("count"));
    let lowest = &buckets[0];
    let edges = lowest["lower_ns"].as_u64()..lowest["upper_ns"].as_u64();
    assert!(edges.contains(&Some(number("min_ns"))), "{histogram}");
}

/// For people there is a line for each power of two, below what the span's latencies come to.
#[test]
fn histogram_as_text() {
    let Some(stdout) = loopback("histogram_as_text", 100, &["--histogram", "--no-events"]) else { return };
    let lines: Vec<_> = stdout.lines().collect();
    let [first, rows @ .., blank, ledger] = &lines[..] else { panic!("{stdout}") };
    assert!(first.starts_with(&format!("{LOOPBACK}: n ")) && first.contains(" p99 "), "{stdout}");
    assert!(!rows.is_empty() && rows.iter().all(|row| row.starts_with('[') && row.ends_with('|')), "{stdout}");
    assert!(blank.is_empty() && ledger.starts_with(&format!("{LOOPBACK}: started ")), "{stdout}");
}

/// A threshold that nothing gets over leaves no event; one that everything does leaves all. The histogram has all.
#[test]
fn min_latency() {
    for (latency, is_met) in [("1h", false), ("1ns", true)] {
        let arguments = ["--json", "--histogram", "--min-latency", latency];
        let Some(stdout) = loopback("min_latency", 100, &arguments) else { return };
        let (mut lines, ledger) = parse(&stdout);
        let histogram = lines.pop().expect("a histogram");
        assert!(histogram["count"].as_u64() >= Some(100), "{histogram}");
        let (events, others) = if is_met { ("emitted", "below_threshold") } else { ("below_threshold", "emitted") };
        assert_eq!((&ledger[events], &ledger[others]), (&ledger["completed"], &0.into()), "{ledger}");
        assert_eq!(lines.is_empty(), !is_met, "{stdout}");
    }
}

/// One in ten is about one in ten, and all are accounted for.
#[test]
fn sample() {
    let Some(stdout) = loopback("sample", 10_000, &["--json", "--sample", "10"]) else { return };
    let (lines, ledger) = parse(&stdout);
    let number = |name: &str| ledger[name].as_u64().expect(name);
    assert_eq!(number("emitted") + number("unsampled"), number("completed") + number("doubtful"), "{ledger}");
    assert_eq!(lines.len() as u64, number("delivered"), "{ledger}");
    // 30 is the standard deviation of 10,000.
    let share = number("emitted") * 10_000 / number("completed");
    assert!((500..2_000).contains(&share), "{ledger}");
}

/// Each CPU's histogram, which together have all.
#[test]
fn group_by_cpu() {
    let arguments = ["--json", "--no-events", "--group-by", "cpu"];
    let Some(stdout) = loopback("group_by_cpu", 1_000, &arguments) else { return };
    let (lines, ledger) = parse(&stdout);
    let count: u64 = lines.iter().filter_map(|line| line["count"].as_u64()).sum();
    assert!((1_000..=ledger["completed"].as_u64().expect("a count")).contains(&count), "{stdout}");
    for line in &lines {
        assert!(line["group"].as_str().expect("a group").starts_with("cpu "), "{line}");
    }
}

/// Loopback has its histogram, and datagrams have theirs, where the kernel lets packets be followed.
#[test]
fn group_by_packet() {
    for (by, group) in [("interface", "interface 1"), ("protocol", "protocol 17")] {
        let arguments = ["--json", "--no-events", "--group-by", by];
        if !Support::probe().has(Feature::TypedTracepoints) {
            println!("group_by_packet: this machine doesn't allow tracepoints with types");
            return;
        }
        let Some(stdout) = loopback("group_by_packet", 1_000, &arguments) else { return };
        let (lines, _) = parse(&stdout);
        let own = lines.iter().find(|line| line["group"] == group).unwrap_or_else(|| panic!("{stdout}"));
        assert!(own["count"].as_u64() >= Some(1_000), "{own}");
    }
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
    let pcap = if cfg!(feature = "pcap") { "libpcap doesn't understand `port`" } else { "--features pcap" };
    let cases: [(&[&str], &str); 20] = [
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
        (&["--function", "ip_rcv", "--sample", "0"], "0 is not in 1.."),
        (&["--function", "ip_rcv", "--min-latency", "1"], "time unit needed"),
        (&["--function", "ip_rcv", "--min-latency", "1ms", "--sample", "2"], "cannot be used with"),
        (&["--function", "ip_rcv", "--no-events", "--sample", "2"], "cannot be used with"),
        (&["--function", "ip_rcv", "--no-events", "--count", "2"], "cannot be used with"),
        (
            &["--function", "ip_rcv", "--group-by", "queue"],
            "nothing can be grouped by `queue`: cpu, interface, protocol, local-port are possible",
        ),
        (&["--function", "ip_rcv", "--pcap", "port"], pcap),
        (&["--function", "ip_rcv", "--traffic", "icmp:3"], "`icmp` is neither udp nor tcp"),
    ];
    for (arguments, text) in cases {
        let error = refused(&watch(arguments));
        assert!(error.contains(text), "{arguments:?}: {error}");
    }
}
