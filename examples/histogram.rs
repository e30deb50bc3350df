//! How long does the kernel take to receive a packet? Each second a line about the calls of `ip_rcv` since the last, until
//! Ctrl-C; then all of them.
//!
//! The kernel counts the calls by their length. Nothing is sent to this program for a call, and it costs the least that
//! it can.
//!
//! Run it as root: `cargo build --example histogram && sudo target/debug/examples/histogram`

use std::sync::mpsc;
use std::time::Duration;

use dwell::{Events, Histogram, LatencyProbe};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (interrupt, interrupted) = mpsc::channel();
    ctrlc::set_handler(move || {
        let _ = interrupt.send(());
    })?;

    let probe = LatencyProbe::builder().function("ip_rcv").events(Events::None).attach()?;
    println!("{:>9} {:>12} {:>12} {:>12}", "CALLS", "P50", "P99", "MAX");
    let mut earlier = Histogram::new();
    while interrupted.recv_timeout(Duration::from_secs(1)).is_err() {
        // Nothing is ever reset: what came in between is the difference of two snapshots.
        let now = probe.histogram("ip_rcv")?;
        let second = now.since(&earlier);
        let columns = [second.quantile(0.5), second.quantile(0.99), second.max()].map(or_dash);
        println!("{:>9} {:>12} {:>12} {:>12}", second.count(), columns[0], columns[1], columns[2]);
        earlier = now;
    }

    println!("\n{:#}\n\n{}", probe.histogram("ip_rcv")?, probe.stop());
    Ok(())
}

fn or_dash(latency: Option<Duration>) -> String {
    latency.map_or("-".to_owned(), |latency| format!("{latency:?}"))
}
