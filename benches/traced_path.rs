//! What a probe adds to a call of `ip_rcv`, in instructions: run in a guest whose clock counts them, as
//! `scripts/bench traced-path` does.
//!
//! Prints a line of JSON with what each probe adds, and on standard error what it has found, row by row.

#![allow(missing_docs, reason = "a program")]

mod shared;

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use dwell::{Events, LatencyProbe, LatencyProbeBuilder};
use serde_json::Value;
use shared::instructions::{Common, tool};
use shared::peer::{self, Peer, Sign};
use shared::rows::Detach;
use shared::{load, own, table};

const FUNCTION: &str = "ip_rcv";

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    /// What to measure besides no probe at all; by default all of the table's
    #[arg(long, value_delimiter = ',')]
    rows: Vec<Row>,
    /// Where `scripts/peers` has put funclatency
    #[arg(long)]
    funclatency: Option<PathBuf>,
    /// Where it has put perf
    #[arg(long)]
    perf: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Row {
    /// fentry and fexit programs that do nothing
    Empty,
    /// The same with the clock read in each
    Floor,
    /// `dwell` with its histogram alone
    Histogram,
    /// `dwell` with events for calls that take longer than any does
    Threshold,
    /// `dwell` with an event for each call, handed to a callback
    Event,
    /// `dwell` with a filter on threads, which leaves out all calls
    FilteredThread,
    /// `dwell` with a filter on ports, which leaves out all calls
    FilteredPort,
    /// The same filter as one that all calls pass, with the histogram alone
    PassedPort,
    /// `dwell` with an event for each call that tells whose packet it was, handed to a callback
    Identity,
    /// As `threshold`, with the story of calls that take longer
    Story,
    /// `dwell` with an event for each call, sent to another thread
    Channel,
    /// As `histogram`, with calls paired by frames where the kernel has sessions
    HistogramFrames,
    /// As `threshold`, with calls paired by frames
    ThresholdFrames,
    /// funclatency by fentry and fexit
    FunclatencyFentry,
    /// funclatency by kprobe and kretprobe
    FunclatencyKprobe,
    /// A bpftrace script by fentry and fexit
    BpftraceFentry,
    /// A bpftrace script by kprobe and kretprobe
    BpftraceKprobe,
    /// perf ftrace latency
    Perf,
}

/// No call takes so long.
const NEVER: Events = Events::OverThreshold(Duration::from_secs(3600));

impl Row {
    /// Not in the line of JSON: for who works on the programs.
    fn is_extra(self) -> bool {
        matches!(self, Row::Channel | Row::HistogramFrames | Row::ThresholdFrames)
    }

    fn attach(self, arguments: &Arguments) -> Result<Detach, Box<dyn Error>> {
        match self {
            Row::Empty => arguments.common.floor(["empty_entry", "empty_exit"]),
            Row::Floor => arguments.common.floor(["floor_entry", "floor_exit"]),
            Row::Histogram => own::counted(probe().events(Events::None)),
            Row::HistogramFrames => own::counted(probe().events(Events::None).frames()),
            Row::Threshold => own::counted(probe().events(NEVER)),
            Row::ThresholdFrames => own::counted(probe().events(NEVER).frames()),
            Row::Event => own::called_back(probe()),
            Row::FilteredThread => own::filtered_out(probe().events(NEVER).filter("pid 1".parse()?)),
            Row::FilteredPort => own::filtered_out(probe().events(NEVER).filter("udp dst port 9".parse()?)),
            Row::PassedPort => own::counted(probe().events(Events::None).filter("udp and not dst port 9".parse()?)),
            Row::Identity => own::called_back(probe().identify()),
            Row::Story => own::counted(probe().events(NEVER).stories()),
            Row::Channel => own::received(probe()),
            Row::FunclatencyFentry => funclatency(arguments, &[FUNCTION]),
            Row::FunclatencyKprobe => funclatency(arguments, &["-k", FUNCTION]),
            Row::BpftraceFentry => arguments.common.bpftrace(&script("fentry", "fexit")),
            Row::BpftraceKprobe => arguments.common.bpftrace(&script("kprobe", "kretprobe")),
            Row::Perf => {
                let perf = tool(arguments.perf.as_deref())?;
                let peer = Peer::start(perf, &["ftrace", "latency", "-n", "-T", FUNCTION], Sign::Ftrace)?;
                Ok(Box::new(|| Ok(Some(peer::perf_calls(&peer.stop()?)))))
            }
        }
    }
}

fn probe() -> LatencyProbeBuilder {
    LatencyProbe::builder().function(FUNCTION)
}

fn funclatency(arguments: &Arguments, options: &[&str]) -> Result<Detach, Box<dyn Error>> {
    let peer = Peer::start(tool(arguments.funclatency.as_deref())?, options, Sign::Links)?;
    Ok(Box::new(|| Ok(Some(peer::funclatency_calls(&peer.stop()?)))))
}

/// As bpftrace's own manual and tools measure a function.
fn script(entry: &str, exit: &str) -> String {
    format!(
        "{entry}:{FUNCTION} {{ @start[tid] = nsecs; }}
         {exit}:{FUNCTION} /@start[tid]/ {{ @ns = hist(nsecs - @start[tid]); delete(@start, tid); }}"
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    if load::was_load()? {
        return Ok(());
    }
    let arguments = Arguments::parse();
    if arguments.common.table {
        print(&table::read()?);
        return Ok(());
    }
    let of_table: Vec<Row> = Row::value_variants().iter().copied().filter(|row| !row.is_extra()).collect();
    arguments.common.measure(&arguments.rows, &of_table, |row| row.attach(&arguments))
}

/// What is to be reached: a row, what it is compared with, and the highest ratio.
const TARGETS: [(&str, &str, f64); 4] = [
    ("histogram", "floor", 1.35),
    ("histogram", "funclatency_fentry", 0.38),
    ("threshold", "floor", 1.40),
    ("event", "floor", 1.80),
];

fn print(measured: &[Value]) {
    let mut header = vec!["instructions added to a call of ip_rcv".to_owned()];
    for one in measured {
        header.extend([format!("Linux {}", table::kernel(one)), "x floor".to_owned(), "histogram is x".to_owned()]);
    }
    let mut rows = vec![header];
    for (name, what) in DESCRIPTIONS {
        let mut row = vec![what.to_owned()];
        for one in measured {
            let is_peer = TOOLS.contains(&name);
            row.push(table::whole(one[name].as_f64()));
            row.push(if name == "none" { String::new() } else { table::factor(table::ratio(one, name, "floor")) });
            row.push(if is_peer { table::factor(table::ratio(one, "histogram", name)) } else { String::new() });
        }
        rows.push(row);
    }
    table::print(&rows);
    println!();
    for (row, to, most) in TARGETS {
        for one in measured {
            let reached = table::ratio(one, row, to);
            let verdict = match reached {
                Some(ratio) if ratio <= most => "reached",
                Some(_) => "NOT REACHED",
                None => "not measured",
            };
            let reached = reached.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"));
            println!("Linux {}: {row} / {to} = {reached}, at most {most:.2}: {verdict}", table::kernel(one));
        }
    }
}

const TOOLS: [&str; 5] = ["funclatency_fentry", "funclatency_kprobe", "bpftrace_fentry", "bpftrace_kprobe", "perf"];

const DESCRIPTIONS: [(&str, &str); 16] = [
    ("none", "no probe (a whole datagram, sent and received)"),
    ("empty", "an empty fentry and fexit program"),
    ("floor", "the same with the clock read in each: the floor"),
    ("histogram", "dwell, histogram only"),
    ("threshold", "dwell, histogram and a threshold that is never met"),
    ("event", "dwell, histogram and an event for each call"),
    ("filtered_thread", "dwell, a filter on threads that leaves out each call"),
    ("filtered_port", "dwell, a filter on ports that leaves out each call"),
    ("passed_port", "dwell, histogram only, a filter on ports that each call passes"),
    ("identity", "dwell, histogram and an event with identity for each call"),
    ("story", "dwell, a threshold that is never met, and stories"),
    ("funclatency_fentry", "libbpf-tools funclatency, fentry"),
    ("funclatency_kprobe", "libbpf-tools funclatency, kprobe"),
    ("bpftrace_fentry", "bpftrace, fentry and fexit, hist()"),
    ("bpftrace_kprobe", "bpftrace, kprobe and kretprobe, hist()"),
    ("perf", "perf ftrace latency (function graph: Debian's perf has no BPF skeletons)"),
];
