//! What it costs in user space to hand an event over, beside reading the kernel's ring buffer and doing nothing else; and
//! what traffic pays for it.
//!
//! Runs on any machine that lets one load programs and attach them to raw tracepoints, also where it refuses to trace
//! functions. Under emulation the figures mean nothing.

#![allow(missing_docs, reason = "a program")]

#[path = "../shared/compile.rs"]
mod compile;
mod delivery;
mod programs;
#[path = "../shared/test_run.rs"]
mod test_run;
mod traffic;

use std::error::Error;

use clap::Parser;
use serde_json::json;

/// How much more than reading the kernel's ring buffer in place each way may cost.
const TO_REACH: [(&str, f64); 3] = [("callback", 1.5), ("batches", 4.0), ("events", 8.0)];
/// How much more than by counting traffic may be slowed by streaming.
const SLOWED: f64 = 1.25;

#[derive(Parser)]
struct Arguments {
    /// One line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Rounds, in each of which every way has its turn
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// Each round's figures, in the order of the names.
type Rounds = Vec<(&'static str, Vec<f64>)>;

/// The least of all rounds: what had the least to do with what else the machine is busy with.
fn least(rounds: &Rounds) -> Vec<f64> {
    rounds.iter().map(|(_, values)| values.iter().copied().fold(f64::INFINITY, f64::min)).collect()
}

fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn verdict(reached: bool) -> &'static str {
    if reached { "reached" } else { "NOT reached" }
}

fn measure(rounds: usize) -> Result<(Rounds, Rounds), Box<dyn Error>> {
    let object = compile::object("streaming")?;
    Ok((delivery::rounds(&object, rounds)?, traffic::rounds(&object, rounds)?))
}

fn main() {
    let arguments = Arguments::parse();
    libbpf_rs::set_print(None);
    let (delivery, traffic) = match measure(arguments.rounds) {
        Ok(measured) => measured,
        Err(why) if arguments.json => {
            println!("{}", json!({ "benchmark": "streaming", "kernel": kernel(), "not_measured": why.to_string() }));
            return;
        }
        Err(why) => {
            println!("Streaming: not measured: {why}");
            return;
        }
    };
    let (event, packet) = (least(&delivery), least(&traffic));
    let added: Vec<_> = packet.iter().map(|value| value - packet[0]).collect();
    if arguments.json {
        let mut line = json!({ "benchmark": "streaming", "kernel": kernel(), "unit": "ns" });
        for (n, (name, _)) in delivery.iter().enumerate() {
            line["event"][name] = round(event[n]).into();
            line["event_to_libbpf"][name] = round(event[n] / event[0]).into();
        }
        for (n, (name, _)) in traffic.iter().enumerate() {
            line["packet"][name] = round(packet[n]).into();
            line["packet_to_counting"][name] = round(packet[n] / packet[1]).into();
            line["added_to_counting"][name] = round(added[n] / added[1]).into();
        }
        println!("{line}");
        return;
    }
    println!("Streaming: CPU time of all threads in user space for each event (least of {} rounds)", arguments.rounds);
    println!("{:<24} {:>8} {:>8}  to reach", "", "ns", "x");
    for (n, (name, _)) in delivery.iter().enumerate() {
        let ratio = event[n] / event[0];
        let wanted = TO_REACH.iter().find(|(wanted, _)| wanted == name);
        let reach = wanted.map_or(String::new(), |(_, most)| format!("  {most} x: {}", verdict(ratio <= *most)));
        println!("{name:<24} {:>8.1} {ratio:>8.2}{reach}", event[n]);
    }
    println!();
    println!("Traffic: CPU time of the sending thread for each packet over loopback, which one probe times");
    println!("{:<24} {:>8} {:>8} {:>12} {:>12}", "", "ns", "added", "of counting", "packet x");
    for (n, (name, _)) in traffic.iter().enumerate() {
        println!(
            "{name:<24} {:>8.0} {:>8.0} {:>12.2} {:>12.2}",
            packet[n],
            added[n],
            added[n] / added[1],
            packet[n] / packet[1]
        );
    }
    let worst = added.iter().skip(2).fold(0.0, |worst: f64, added| worst.max(*added));
    println!("To reach: what streaming adds is {SLOWED} x what counting adds: {}", verdict(worst <= SLOWED * added[1]));
    println!("So many packets a second with counting: {:.0}", 1e9 / packet[1]);
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
