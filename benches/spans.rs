//! What a span between hooks adds to a packet, in instructions: run in a guest whose clock counts them, as
//! `scripts/bench spans` does.
//!
//! Spans are keyed by the packet and know when it is freed. Beside them the same in bpftrace, which has to be told where
//! that may be. Prints a line of JSON with what each adds, and on standard error what it has found, row by row.

#![allow(missing_docs, reason = "a program")]

mod shared;

use std::error::Error;

use clap::{Parser, ValueEnum};
use dwell::{Events, Hook, Key, LatencyProbe, LatencyProbeBuilder, Span};
use serde_json::Value;
use shared::instructions::Common;
use shared::rows::Detach;
use shared::{load, own, table};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    common: Common,
    /// What to measure besides no probe at all; everything by default
    #[arg(long, value_delimiter = ',')]
    rows: Vec<Row>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Row {
    /// Programs at both tracepoints that read the clock
    TracepointsFloor,
    /// `dwell` between tracepoints, with its histogram alone
    TracepointsHistogram,
    /// The same, and an event for each packet
    TracepointsEvent,
    /// A bpftrace script for it
    TracepointsBpftrace,
    /// Programs at both functions' entries that read the clock
    FunctionsFloor,
    /// `dwell` between the entries of functions, with its histogram alone
    FunctionsHistogram,
    /// The same, and an event for each packet
    FunctionsEvent,
    /// A bpftrace script for it
    FunctionsBpftrace,
}

impl Row {
    fn attach(self, common: &Common) -> Result<Detach, Box<dyn Error>> {
        match self {
            Row::TracepointsFloor => common.floor(["floor_start", "floor_end"]),
            Row::TracepointsHistogram => own::counted(tracepoints().events(Events::None)),
            Row::TracepointsEvent => own::called_back(tracepoints()),
            Row::TracepointsBpftrace => common.bpftrace(&by_tracepoints()),
            Row::FunctionsFloor => common.floor(["floor_entry", "floor_enqueue"]),
            Row::FunctionsHistogram => own::counted(functions().events(Events::None)),
            Row::FunctionsEvent => own::called_back(functions()),
            Row::FunctionsBpftrace => common.bpftrace(&by_functions()),
        }
    }
}

/// From where a packet is handed to the device to where it comes out of it again.
fn tracepoints() -> LatencyProbeBuilder {
    between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"))
}

/// From the IP layer to the socket's queue.
fn functions() -> LatencyProbeBuilder {
    between(Hook::entry("ip_rcv"), Hook::entry("__udp_enqueue_schedule_skb"))
}

fn between(from: Hook, to: Hook) -> LatencyProbeBuilder {
    LatencyProbe::builder().span(Span::between(from, to).keyed_by(Key::Skb))
}

fn by_tracepoints() -> String {
    "rawtracepoint:net_dev_queue { @start[arg0] = nsecs; }
     rawtracepoint:netif_receive_skb /@start[arg0]/ { @ns = hist(nsecs - @start[arg0]); delete(@start, arg0); }"
        .to_owned()
        + FREED
}

fn by_functions() -> String {
    "fentry:ip_rcv { @start[(uint64)args.skb] = nsecs; }
     fentry:__udp_enqueue_schedule_skb /@start[(uint64)args.skb]/ {
         @ns = hist(nsecs - @start[(uint64)args.skb]); delete(@start, (uint64)args.skb);
     }"
    .to_owned()
        + FREED
}

/// Without it, the map keeps the addresses of packets that never came.
const FREED: &str = "
     rawtracepoint:kfree_skb { delete(@start, arg0); }
     rawtracepoint:consume_skb { delete(@start, arg0); }";

fn main() -> Result<(), Box<dyn Error>> {
    if load::was_load()? {
        return Ok(());
    }
    let arguments = Arguments::parse();
    if arguments.common.table {
        print(&table::read()?);
        return Ok(());
    }
    arguments.common.measure(&arguments.rows, Row::value_variants(), |row| row.attach(&arguments.common))
}

fn print(measured: &[Value]) {
    let mut header = vec!["instructions added to a packet".to_owned()];
    for one in measured {
        header.extend([format!("Linux {}", table::kernel(one)), "x bpftrace".to_owned()]);
    }
    let mut rows = vec![header];
    for (name, what) in DESCRIPTIONS {
        let bpftrace = if name.starts_with("tracepoints") { "tracepoints_bpftrace" } else { "functions_bpftrace" };
        let mut row = vec![what.to_owned()];
        for one in measured {
            row.push(table::whole(one[name].as_f64()));
            row.push(if name == "none" { String::new() } else { table::factor(table::ratio(one, name, bpftrace)) });
        }
        rows.push(row);
    }
    table::print(&rows);
}

const DESCRIPTIONS: [(&str, &str); 9] = [
    ("none", "no probe (a whole datagram, sent and received)"),
    ("tracepoints_floor", "net_dev_queue..netif_receive_skb: the clock read at both"),
    ("tracepoints_histogram", "  dwell, histogram only"),
    ("tracepoints_event", "  dwell, histogram and an event for each packet"),
    ("tracepoints_bpftrace", "  bpftrace, hist()"),
    ("functions_floor", "ip_rcv..__udp_enqueue_schedule_skb: the clock read at both"),
    ("functions_histogram", "  dwell, histogram only"),
    ("functions_event", "  dwell, histogram and an event for each packet"),
    ("functions_bpftrace", "  bpftrace, hist()"),
];
