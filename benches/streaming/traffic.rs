//! What traffic pays: packets over the loopback device, as fast as the kernel makes them, without a probe, with one that
//! counts, and with one that streams.

use std::error::Error;
use std::hint;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::thread;
use std::time::Duration;

use dwell::{Events, Hook, LatencyProbe, LatencyProbeBuilder, Span};

use crate::Rounds;
use crate::programs::{open, program};
use crate::test_run::test_run;

const PACKETS: u32 = 10_000;
const RUNS: usize = 20;

pub fn rounds(object: &Path, rounds: usize) -> Result<Rounds, Box<dyn Error>> {
    let object = open(object, "packet")?.load()?;
    let packet = program(&object, "packet")?;
    let packet = packet.as_fd();
    let names = ["no probe", "counting", "streaming: callback", "streaming: batches", "streaming: events"];
    let mut ways: Rounds = names.map(|name| (name, Vec::new())).into();
    for _ in 0..rounds {
        ways[0].1.push(packets(packet)?);
        ways[1].1.push(with(packet, across().events(Events::None).attach()?)?);
        let callback = |event: &dwell::EventView<'_>| _ = hint::black_box(event.latency());
        ways[2].1.push(with(packet, across().attach_with(callback)?)?);
        ways[3].1.push(with(packet, across().in_batches(1_024).attach()?)?);
        ways[4].1.push(with(packet, across().attach()?)?);
    }
    Ok(ways)
}

fn across() -> LatencyProbeBuilder {
    let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    LatencyProbe::builder().span(span.named("across"))
}

/// Nanoseconds of a packet while the probe runs, and somebody receives its events.
fn with(packet: BorrowedFd<'_>, probe: LatencyProbe) -> Result<f64, Box<dyn Error>> {
    let (events, batches) = (probe.events().clone(), probe.batches().clone());
    let receiver = thread::spawn(move || {
        let add = |sum: Duration, latency: Duration| sum.saturating_add(latency);
        let sum = events.iter().map(|event| event.latency).fold(Duration::ZERO, add);
        batches.iter().fold(sum, |sum, batch| batch.iter().map(|event| event.latency).fold(sum, add))
    });
    let nanos = packets(packet);
    let ledger = probe.stop();
    hint::black_box(receiver.join().map_err(|_| "receiving failed")?);
    let seen = ledger.spans[0].completed;
    let sent = u64::from(PACKETS) * RUNS as u64;
    if seen < sent * 9 / 10 {
        return Err(format!("{sent} packets were sent: {ledger}").into());
    }
    nanos
}

/// Nanoseconds of a packet: the least of some runs, which had the least to do with anything else.
fn packets(packet: BorrowedFd<'_>) -> Result<f64, Box<dyn Error>> {
    test_run(packet, PACKETS / 10)?;
    let runs = (0..RUNS).map(|_| test_run(packet, PACKETS)).collect::<Result<Vec<_>, _>>()?;
    let least = runs.iter().min().copied().unwrap_or_default();
    Ok(least.as_nanos() as f64 / f64::from(PACKETS))
}
