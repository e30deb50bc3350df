//! Whether a probe can run for months, in minutes: one that lives as long as this, and random ones that come and go beside
//! it, under random traffic. `scripts/soak` runs it.
//!
//! Asserts that all ledgers add up, that every event is received or accounted for, and that neither memory nor descriptors,
//! threads, or objects of BPF grow. Prints a line for each twentieth of the time, and says at the end what it came to.

#![allow(missing_docs, reason = "a program")]

#[path = "../tests/mix/mod.rs"]
mod mix;

use std::error::Error;
use std::fmt;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use dwell::{Events, GroupBy, Hook, LatencyProbe, Span};
use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};

use mix::Hooks;

#[derive(Parser)]
struct Arguments {
    /// How long
    #[arg(long, default_value_t = 1)]
    minutes: u32,
    /// What decides what is asked for; random by default
    #[arg(long)]
    seed: Option<u64>,
    /// cargo says that it is a benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

const SLICES: u32 = 20;
/// By then every thread has had its memory, and what is cached is cached.
const WARM: usize = 6;
/// What an allocator may keep, more or less.
const ROOM: i64 = 8 << 20;

/// What the process holds, and what the kernel holds for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    resident: i64,
    descriptors: usize,
    threads: usize,
    bpf: [usize; 3],
}

impl Held {
    fn now() -> Result<Self, Box<dyn Error>> {
        let statm = fs::read_to_string("/proc/self/statm")?;
        let pages: i64 = statm.split(' ').nth(1).ok_or("/proc/self/statm has no second number")?.parse()?;
        Ok(Self {
            resident: pages * rustix::param::page_size() as i64,
            descriptors: fs::read_dir("/proc/self/fd")?.count(),
            threads: fs::read_dir("/proc/self/task")?.count(),
            bpf: [ProgInfoIter::default().count(), MapInfoIter::default().count(), LinkInfoIter::default().count()],
        })
    }

    /// Once what was let go of is freed, a moment later: the least of what is held.
    fn settled(before: &Self) -> Result<Self, Box<dyn Error>> {
        let mut now = Self::now()?;
        for _ in 0..200 {
            if now.descriptors <= before.descriptors && now.threads <= before.threads && now.bpf <= before.bpf {
                break;
            }
            thread::sleep(Duration::from_millis(20));
            now = Self::now()?;
        }
        Ok(now)
    }
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [programs, maps, links] = self.bpf;
        write!(
            f,
            "{:.1} MiB, {} descriptors, {} threads, {programs} programs, {maps} maps, {links} links",
            self.resident as f64 / f64::from(1 << 20),
            self.descriptors,
            self.threads
        )
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let Arguments { minutes, seed, .. } = Arguments::parse();
    let hooks = Hooks::here().map_err(|support| format!("not possible on this machine: {support}"))?;
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));

    let received = Arc::new(AtomicU64::new(0));
    let lasting = lasting(hooks, Arc::clone(&received))?;
    let before = Held::now()?;
    println!("{minutes} minutes, seed {seed}; the lasting probe: {before}");
    let (begin, slice) = (Instant::now(), Duration::from_secs(60) * minutes / SLICES);
    let mut held = Vec::new();
    let (mut ledger, mut probes) = (lasting.ledger(), 0);
    for n in 0..SLICES {
        probes += mix::rounds(seed.wrapping_add(n.into()), slice, hooks).probes;
        let now = Held::settled(&before)?;
        let next = lasting.ledger();
        println!("{:?}: {now}\n{}", begin.elapsed(), &next - &ledger);
        for span in lasting.spans() {
            lasting.slowest(&span.name)?;
            lasting.groups(&span.name)?;
        }
        ledger = next;
        held.push(now);
    }

    let last = lasting.stop();
    last.check()?;
    let delivered: u64 = last.spans.iter().map(|account| account.delivered).sum();
    println!("the lasting probe: {last}");
    println!("{probes} others, {:?}, from {} to {}", begin.elapsed(), held[WARM], held[held.len() - 1]);
    if delivered != received.load(Ordering::Relaxed) {
        return Err(
            format!("{delivered} events were delivered, but {} received", received.load(Ordering::Relaxed)).into()
        );
    }
    let (warm, last) = (held[WARM], held[held.len() - 1]);
    if last.resident - warm.resident > ROOM {
        return Err(format!("memory grows: {warm} | {last}").into());
    }
    if held.iter().any(|now| Held { resident: 0, ..*now } != Held { resident: 0, ..before }) {
        return Err(format!("something is left: {before} | {held:?}").into());
    }
    Ok(())
}

/// The agent that nobody looks at: everything on, and read by a callback.
fn lasting(hooks: Hooks, received: Arc<AtomicU64>) -> Result<LatencyProbe, dwell::Error> {
    let across = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    let mut builder = LatencyProbe::builder()
        .span(across.named("across").with_abandoned().grouped_by(GroupBy::Protocol))
        .identify()
        .stories()
        .keep_slowest(10)
        .max_age(Duration::from_secs(5));
    if hooks == Hooks::All {
        builder = builder
            .span(Span::function("ip_rcv").grouped_by(GroupBy::LocalPort))
            .span(Span::function("udp_recvmsg").grouped_by(GroupBy::Cpu).events(Events::OneIn(10)));
    }
    builder.attach_with(move |_| {
        received.fetch_add(1, Ordering::Relaxed);
    })
}
