//! Which packets took longer than a given time, where, and what the kernel was doing? The story of each of them.
//!
//! `sudo target/debug/examples/slow_packets --over 100us`

#[path = "../shared/events.rs"]
mod events;
#[path = "../shared/interrupt.rs"]
mod interrupt;
mod tell;
#[path = "../shared/traffic.rs"]
mod traffic;

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use crossbeam_channel::{bounded, never, select};
use dwell::{Filter, LatencyEvent, LatencyProbe, Stage};
use humantime::parse_duration;

use traffic::Traffic;

/// Tells the story of every packet that spent longer than a given time in a stage of the network stack: whose it was,
/// where it was held up, and what the kernel was doing.
///
/// Ends after --count packets, --duration, when all of --traffic has been seen, or on Ctrl-C.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Only what takes at least so long in one stage, such as 50us or 1ms
    #[arg(long, value_name = "DURATION", default_value = "1ms", value_parser = parse_duration)]
    over: Duration,

    /// Only these packets, in tcpdump's words and some more: 'tcp dst port 443', 'netns /run/netns/a', 'cgroup /system.slice'
    #[arg(long, value_name = "EXPR")]
    filter: Option<Filter>,

    /// Stages to look at, instead of all that packets pass; can be repeated
    #[arg(long = "stage", value_name = "NAME")]
    stages: Vec<Stage>,

    /// Print one JSON object for each
    #[arg(long)]
    json: bool,

    /// End after so many
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// End after this time, such as 10s or 5m
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    duration: Option<Duration>,

    /// Send N datagrams, or N short TCP messages, to ourselves over 127.0.0.1
    #[arg(long, value_name = "udp:N|tcp:N")]
    traffic: Option<Traffic>,
}

/// Those in which something may hold up a packet, or in which it may wait. What contains several packets isn't among them.
const STAGES: [Stage; 14] = [
    Stage::TcIngress,
    Stage::TcEgress,
    Stage::NetfilterPreRouting,
    Stage::NetfilterLocalIn,
    Stage::NetfilterForward,
    Stage::NetfilterLocalOut,
    Stage::NetfilterPostRouting,
    Stage::IpReceive,
    Stage::IpSend,
    Stage::Neighbour,
    Stage::Qdisc,
    Stage::TcpReceive,
    Stage::UdpReceive,
    Stage::SocketQueue,
];

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slow_packets: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let interrupted = interrupt::interrupted()?;

    let stages = if arguments.stages.is_empty() { &STAGES[..] } else { &arguments.stages };
    let mut builder = LatencyProbe::builder().min_latency(arguments.over).identify().stories().best_effort();
    if let Some(filter) = &arguments.filter {
        builder = builder.filter(filter.clone());
    }
    let probe = stages.iter().fold(builder, |builder, stage| builder.stage(*stage)).attach()?;
    // Most are left out for one and the same reason.
    let mut left_out: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for failure in probe.failures() {
        left_out.entry(failure.error.to_string()).or_default().push(failure.span.as_str());
    }
    for (error, stages) in left_out {
        eprintln!("slow_packets: left out: {}: {error}", stages.join(", "));
    }
    eprintln!("waiting for packets that take {:?} or longer", arguments.over);

    let (finish, finished) = bounded(1);
    let finished = match arguments.traffic {
        Some(traffic) => {
            thread::spawn(move || finish.send(traffic.run()));
            finished
        }
        None => never(),
    };
    let end = arguments.duration.and_then(|duration| Instant::now().checked_add(duration));
    let time_is_up = end.map_or_else(never, crossbeam_channel::at);
    let events = probe.events().clone();
    let mut out = io::stdout().lock();
    let mut told = 0;
    let is_enough = |told| arguments.count.is_some_and(|count| told >= count);
    while !is_enough(told) {
        select! {
            recv(events) -> event => {
                let Ok(event) = event else { break };
                tell(&mut out, &event, arguments.json)?;
            }
            recv(interrupted) -> _ => break,
            recv(time_is_up) -> _ => break,
            recv(finished) -> result => {
                result??;
                break;
            }
        }
        told += 1;
    }
    // What it has seen until it is stopped is still told.
    let ledger = probe.stop();
    while !is_enough(told) {
        let Ok(event) = events.recv() else { break };
        tell(&mut out, &event, arguments.json)?;
        told += 1;
    }
    let all: u64 = ledger.spans.iter().map(|span| span.completed).sum();
    eprintln!("{told} {}, of {all} ways through a stage", if told == 1 { "story" } else { "stories" });
    // Where there may have been more.
    let lossy = ledger.spans.iter().filter(|span| !span.is_lossless() || span.unparsed > 0);
    for span in lossy {
        eprintln!("slow_packets: not all may have been told: {span}");
    }
    Ok(())
}

fn tell(out: &mut impl Write, event: &LatencyEvent, json: bool) -> io::Result<()> {
    if json {
        writeln!(out, "{}", events::to_json(event))?;
    } else {
        tell::story(out, event)?;
    }
    out.flush()
}
