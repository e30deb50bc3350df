//! How long attaching and detaching 50 functions takes, and 50 spans between tracepoints where the kernel doesn't let
//! functions be traced.
//!
//! What a machine that is emulated takes is reported, and says nothing of the target.

#![allow(missing_docs, reason = "a program")]

use std::error::Error;
use std::time::{Duration, Instant};

use clap::Parser;
use dwell::{ErrorKind, Hook, Key, LatencyProbe, LatencyProbeBuilder, Span};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;

const SPANS: usize = 50;
/// How often all are attached and detached; the slowest counts.
const ROUNDS: usize = 3;
const TO_ATTACH: Duration = Duration::from_secs(2);
const TO_DETACH: Duration = Duration::from_secs(1);

#[derive(Parser)]
struct Arguments {
    /// Print a line of JSON
    #[arg(long)]
    json: bool,
    /// This machine is emulated
    #[arg(long)]
    guest: bool,
    /// Measure spans between tracepoints as well where functions can be traced, to compare
    #[arg(long)]
    tracepoints: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// The slowest of the rounds.
#[derive(Default)]
struct Taken {
    attach: Duration,
    detach: Duration,
    /// What this process has worked for both: on a busy machine, the rest was waiting.
    cpu: Duration,
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    match measure(functions) {
        Ok(taken) => {
            report(&arguments, "functions", &taken);
            if arguments.tracepoints {
                report(&arguments, "tracepoint spans", &measure(tracepoints)?);
            }
        }
        Err(error) if matches!(error.kind(), ErrorKind::TracingRefused { .. }) => {
            eprintln!("functions can't be traced here, so spans between tracepoints are measured: {error}");
            report(&arguments, "tracepoint spans", &measure(tracepoints)?);
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

fn measure(builder: fn() -> LatencyProbeBuilder) -> Result<Taken, dwell::Error> {
    let mut slowest = Taken::default();
    for _ in 0..ROUNDS {
        let worked = worked();
        let begin = Instant::now();
        let probe = builder().attach()?;
        slowest.attach = slowest.attach.max(begin.elapsed());
        let begin = Instant::now();
        drop(probe.stop());
        slowest.detach = slowest.detach.max(begin.elapsed());
        slowest.cpu = slowest.cpu.max(self::worked().saturating_sub(worked));
    }
    Ok(slowest)
}

fn worked() -> Duration {
    // A process's CPU time is never negative.
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

fn functions() -> LatencyProbeBuilder {
    FUNCTIONS.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function))
}

/// Any two of the tracepoints are a span; most of these have no packets, which attaching doesn't mind. By thread, such a
/// span takes three programs, where a function takes two at most; by packet it would be four.
fn tracepoints() -> LatencyProbeBuilder {
    let pairs = TRACEPOINTS.iter().flat_map(|from| TRACEPOINTS.iter().map(move |to| (*from, *to)));
    pairs.filter(|(from, to)| from != to).take(SPANS).fold(LatencyProbe::builder(), |builder, (from, to)| {
        builder.span(Span::between(Hook::tracepoint(from), Hook::tracepoint(to)).keyed_by(Key::Thread))
    })
}

fn report(arguments: &Arguments, what: &str, taken: &Taken) {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let (attach, detach, cpu) = (taken.attach.as_secs_f64(), taken.detach.as_secs_f64(), taken.cpu.as_secs_f64());
    let reached = taken.attach < TO_ATTACH && taken.detach < TO_DETACH;
    if arguments.json {
        let reached = (!arguments.guest).then_some(reached);
        println!(
            "{}",
            json!({ "kernel": release, "guest": arguments.guest, "spans": SPANS, "of": what,
                    "attach_seconds": attach, "detach_seconds": detach, "cpu_seconds": cpu, "reached": reached })
        );
        return;
    }
    let verdict = match reached {
        _ if arguments.guest => "emulated",
        true => "reached",
        false => "NOT REACHED",
    };
    println!(
        "Linux {release}: {SPANS} {what} attach in {attach:.2} s (under 2 s), detach in {detach:.2} s (under 1 s), \
         of CPU {cpu:.2} s: {verdict}"
    );
}

/// All have packets among their arguments.
const TRACEPOINTS: [&str; 8] = [
    "net_dev_queue",
    "net_dev_start_xmit",
    "netif_receive_skb",
    "netif_receive_skb_entry",
    "netif_rx",
    "netif_rx_entry",
    "napi_gro_receive_entry",
    "netif_receive_skb_list_entry",
];

/// Every kernel from 5.10 on has these.
const FUNCTIONS: [&str; SPANS] = [
    "__dev_queue_xmit",
    "__ip_local_out",
    "__ip_queue_xmit",
    "__napi_schedule",
    "__netif_receive_skb",
    "__tcp_transmit_skb",
    "__udp_enqueue_schedule_skb",
    "dev_gro_receive",
    "dev_hard_start_xmit",
    "fib_table_lookup",
    "icmp_rcv",
    "inet_accept",
    "inet_bind",
    "inet_csk_accept",
    "inet_gro_receive",
    "inet_recvmsg",
    "inet_sendmsg",
    "ip6_finish_output2",
    "ip6_input",
    "ip6_output",
    "ip_finish_output2",
    "ip_forward",
    "ip_local_deliver",
    "ip_output",
    "ip_queue_xmit",
    "ip_rcv",
    "ip_route_input_noref",
    "ip_route_output_flow",
    "ip_send_skb",
    "ipv6_rcv",
    "napi_complete_done",
    "neigh_update",
    "netif_receive_skb",
    "sch_direct_xmit",
    "skb_checksum_help",
    "sock_def_readable",
    "tcp_ack",
    "tcp_close",
    "tcp_connect",
    "tcp_data_queue",
    "tcp_rcv_established",
    "tcp_recvmsg",
    "tcp_send_ack",
    "tcp_sendmsg",
    "tcp_v4_do_rcv",
    "tcp_v4_rcv",
    "tcp_write_xmit",
    "udp_rcv",
    "udp_recvmsg",
    "udp_sendmsg",
];
