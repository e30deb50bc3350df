//! CPU time for each event, from the ring to the program.
//!
//! A probe runs whose span never happens by itself; a program writes records of it into the probe's rings, by the
//! crate's own code. The rest is what any probe does: its reader polls, checks, and hands over. Beside it a thread that
//! polls the kernel's ring buffer as often, of the same size and with the same records, and only looks at each latency.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, hint, thread};

use dwell::{Hook, LatencyProbe, LatencyProbeBuilder, Span};
use libbpf_rs::RingBufferBuilder;

use crate::Rounds;
use crate::programs::Writer;

/// Records that are written at once.
const BURST: u32 = 4_096;
const BURSTS: u32 = 100;
const EVENTS: u64 = BURST as u64 * BURSTS as u64;
/// Before that, until all memory has been touched.
const FIRST_BURSTS: u32 = 20;
/// As the crate's reader does.
const PAUSE: Duration = Duration::from_millis(1);
const PATIENCE: Duration = Duration::from_secs(10);

pub fn rounds(object: &Path, rounds: usize) -> Result<Rounds, Box<dyn Error>> {
    let mut ways: Rounds = ["libbpf in place", "callback", "batches", "events"].map(|name| (name, Vec::new())).into();
    for _ in 0..rounds {
        ways[0].1.push(libbpf(object)?);
        ways[1].1.push(callback(object)?);
        ways[2].1.push(batches(object)?);
        ways[3].1.push(events(object)?);
    }
    Ok(ways)
}

/// Counts what one thread receives, for another to wait for.
#[derive(Default)]
struct Seen {
    events: AtomicU64,
    /// Of the latencies, so that somebody has looked at them.
    nanos: AtomicU64,
}

impl Seen {
    fn note(&self, latency: Duration) {
        let add = |to: &AtomicU64, n| to.store(to.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
        add(&self.nanos, latency.as_nanos() as u64);
        add(&self.events, 1);
    }

    fn wait(&self, events: u64) -> Result<(), Box<dyn Error>> {
        let begin = Instant::now();
        while self.events.load(Ordering::Relaxed) < events {
            if begin.elapsed() > PATIENCE {
                return Err(format!("{} events came, not {events}", self.events.load(Ordering::Relaxed)).into());
            }
            thread::sleep(PAUSE / 4);
        }
        Ok(())
    }
}

/// Nanoseconds for each event of a thread that does nothing but read.
fn libbpf(object: &Path) -> Result<f64, Box<dyn Error>> {
    let writer = Writer::to_ring_buffer(object)?;
    let (seen, stop) = (Arc::new(Seen::default()), Arc::new(AtomicBool::new(false)));
    let (counter, stopped, map) = (Arc::clone(&seen), Arc::clone(&stop), writer.ring_buffer()?);
    let read = move || -> libbpf_rs::Result<()> {
        let mut builder = RingBufferBuilder::new();
        builder.add(&map, move |record| {
            let latency = record.get(8..16).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_ne_bytes);
            counter.note(Duration::from_nanos(latency));
            0
        })?;
        let ring = builder.build()?;
        while !stopped.load(Ordering::Relaxed) {
            if ring.consume_raw_n(BURST as usize) < BURST as i32 {
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    };
    let reader = thread::Builder::new().name("libbpf".to_owned()).spawn(read)?;
    let taken = time_of(&["libbpf"], &writer, &seen);
    stop.store(true, Ordering::Relaxed);
    reader.join().map_err(|_| "reading failed")??;
    taken
}

fn callback(object: &Path) -> Result<f64, Box<dyn Error>> {
    let seen = Arc::new(Seen::default());
    let counter = Arc::clone(&seen);
    let _probe = quiet().attach_with(move |event| counter.note(event.latency()))?;
    time_of(&["dwell-reader"], &Writer::to_probe(object)?, &seen)
}

fn batches(object: &Path) -> Result<f64, Box<dyn Error>> {
    let probe = quiet().in_batches(1_024).attach()?;
    let batches = probe.batches().clone();
    received(object, probe, move |seen| {
        batches.iter().for_each(|batch| batch.iter().for_each(|event| seen.note(event.latency)));
    })
}

fn events(object: &Path) -> Result<f64, Box<dyn Error>> {
    let probe = quiet().attach()?;
    let events = probe.events().clone();
    received(object, probe, move |seen| events.iter().for_each(|event| seen.note(event.latency)))
}

/// With a thread that receives.
fn received(
    object: &Path,
    probe: LatencyProbe,
    receive: impl FnOnce(&Seen) + Send + 'static,
) -> Result<f64, Box<dyn Error>> {
    let seen = Arc::new(Seen::default());
    let counter = Arc::clone(&seen);
    let receiver = thread::Builder::new().name("receiver".to_owned()).spawn(move || receive(&counter))?;
    let taken = Writer::to_probe(object).and_then(|writer| time_of(&["dwell-reader", "receiver"], &writer, &seen));
    drop(probe);
    receiver.join().map_err(|_| "receiving failed")?;
    taken
}

/// Nanoseconds for each event that these threads take together.
fn time_of(threads: &[&str], writer: &Writer, seen: &Seen) -> Result<f64, Box<dyn Error>> {
    let bursts = |from: u32, count: u32| -> Result<Duration, Box<dyn Error>> {
        for n in from..from + count {
            writer.write(BURST)?;
            seen.wait(u64::from(n + 1) * u64::from(BURST))?;
        }
        // A thread's time is exact when it sleeps.
        thread::sleep(2 * PAUSE);
        threads.iter().map(|name| cpu_time_of(name)).sum()
    };
    let before = bursts(0, FIRST_BURSTS)?;
    let taken = bursts(FIRST_BURSTS, BURSTS)? - before;
    hint::black_box(seen.nanos.load(Ordering::Relaxed));
    if writer.dropped()? {
        return Err("records found no room".into());
    }
    Ok(taken.as_nanos() as f64 / EVENTS as f64)
}

/// A span that doesn't happen by itself.
fn quiet() -> LatencyProbeBuilder {
    let span = Span::between(Hook::tracepoint("tcp_retransmit_skb"), Hook::tracepoint("tcp_bad_csum"));
    LatencyProbe::builder().span(span.named("quiet"))
}

/// The CPU time of this process' thread of that name.
fn cpu_time_of(name: &str) -> Result<Duration, Box<dyn Error>> {
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.trim() == name {
            let stat = fs::read_to_string(task.join("schedstat"))?;
            let nanos = stat.split(' ').next().unwrap_or_default();
            return Ok(Duration::from_nanos(nanos.parse()?));
        }
    }
    Err(format!("there is no thread {name}").into())
}
