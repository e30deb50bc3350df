//! What it costs to keep a start until its end: the in-flight table beside every kind of BPF hash map.
//!
//! Nothing is attached, and no packet is touched: the kernel runs the programs as tests. It does so on any machine that
//! lets one load programs, also where it refuses to trace functions. Under emulation the figures mean nothing.

#![allow(missing_docs, reason = "a program")]

#[path = "shared/compile.rs"]
mod compile;
#[path = "shared/test_run.rs"]
mod test_run;

use std::collections::BTreeMap;
use std::error::Error;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use std::{io, thread};

use clap::Parser;
use libbpf_rs::{MapCore as _, MapFlags, MapHandle, ObjectBuilder, OpenObject};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::json;
use test_run::test_run;

/// The programs of `store.bpf.c`, and what they are called here. Without the first the rest is nothing.
const STORES: [(&str, &str); 8] = [
    ("empty", "nothing"),
    ("table", "in-flight table"),
    ("hash", "hash"),
    ("hash_no_prealloc", "hash, not preallocated"),
    ("percpu_hash", "per-CPU hash"),
    ("lru", "LRU hash"),
    ("lru_no_common", "LRU hash, lists per CPU"),
    ("lru_percpu", "per-CPU LRU hash"),
];
/// The ratio of the table to the hash map that is to be reached.
const TO_REACH: f64 = 1.0 / 20.0;
/// Pairs that a program makes in each run: `PAIRS` in `store.bpf.c`.
const PAIRS: u32 = 8;
/// Test runs of a round, on each CPU.
const RUNS: usize = 3;

#[derive(Parser)]
struct Arguments {
    /// One line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Rounds, in each of which every store has its turn
    #[arg(long, default_value_t = 31)]
    rounds: usize,
    /// CPU time of a test run, in milliseconds
    #[arg(long, default_value_t = 2)]
    millis: u32,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// A loaded program.
struct Store {
    name: &'static str,
    title: &'static str,
    program: OwnedFd,
    /// Runs that take about as long as was asked for.
    repeat: u32,
    /// Nanoseconds of all pairs so far, by CPUs at once.
    times: BTreeMap<usize, Vec<f64>>,
}

impl Store {
    fn median(&self, cpus: usize) -> f64 {
        let mut times = self.times.get(&cpus).cloned().unwrap_or_default();
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// Loads the programs; the error says what the kernel objects to.
fn load(object: &Path, millis: u32) -> Result<(Vec<Store>, MapHandle), String> {
    let loaded = ObjectBuilder::default()
        .open_file(object)
        .and_then(OpenObject::load)
        .map_err(|error| format!("the kernel doesn't load the programs, which takes Linux 5.12 and root: {error:#}"))?;
    let descriptor = |error| format!("no descriptor: {error:#}");
    let mut stores = Vec::new();
    for (name, title) in STORES {
        let program = loaded.progs().find(|program| program.name().to_string_lossy() == format!("{name}_pairs"));
        let program = program.ok_or_else(|| format!("there is no program for {name}"))?;
        let program = program.as_fd().try_clone_to_owned().map_err(|error| descriptor(error.into()))?;
        stores.push(Store { name, title, repeat: calibrate(&program, millis)?, program, times: BTreeMap::new() });
    }
    let progress = loaded.maps().find(|map| map.name() == "progress").ok_or("there is no progress")?;
    Ok((stores, MapHandle::try_from(&progress).map_err(descriptor)?))
}

/// How many runs take about this long.
fn calibrate(program: &OwnedFd, millis: u32) -> Result<u32, String> {
    const SAMPLE: u32 = 1_000;
    let run = || test_run(program.as_fd(), SAMPLE);
    let taken = run().and_then(|_| run()).map_err(|error| format!("the kernel refuses test runs: {error}"))?;
    let wanted = Duration::from_millis(millis.into());
    let repeat = wanted.as_nanos() * u128::from(SAMPLE) / taken.as_nanos().max(1);
    Ok(repeat.clamp(1, 1 << 24) as u32)
}

/// Nanoseconds of a pair: [`RUNS`] from each CPU, all while the others are at it, too.
fn round(program: BorrowedFd<'_>, repeat: u32, cpus: &[usize]) -> io::Result<Vec<f64>> {
    let barrier = Barrier::new(cpus.len());
    let measured = AtomicUsize::new(0);
    let per_pair = |taken: Duration| taken.as_nanos() as f64 / f64::from(repeat) / f64::from(PAIRS);
    let on = &|cpu| -> io::Result<Vec<f64>> {
        let ready = pin(cpu).and_then(|()| test_run(program, 1));
        barrier.wait();
        let times = ready.and_then(|_| (0..RUNS).map(|_| test_run(program, repeat).map(per_pair)).collect());
        // Whatever came of it, so that nobody goes on for ever.
        measured.fetch_add(1, Ordering::Relaxed);
        while measured.load(Ordering::Relaxed) < cpus.len() {
            test_run(program, repeat / 20 + 1)?;
        }
        times
    };
    let times: io::Result<Vec<_>> = thread::scope(|scope| {
        let threads: Vec<_> = cpus.iter().map(|&cpu| scope.spawn(move || on(cpu))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(io::ErrorKind::Other.into()))).collect()
    });
    times.map(|times| times.concat())
}

fn pin(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// The first two CPUs that this process may use.
fn two_cpus() -> io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(2).collect())
}

/// Pairs that weren't matched: what they cost would be something else.
fn unmatched(progress: &MapHandle) -> libbpf_rs::Result<u64> {
    let mut unmatched = 0;
    for key in progress.keys() {
        let value = progress.lookup(&key, MapFlags::ANY)?.unwrap_or_default();
        let word = |n: usize| value.get(8 * n..8 * n + 8).and_then(|bytes| bytes.try_into().ok());
        let number = |n| word(n).map_or(0, u64::from_ne_bytes);
        unmatched += number(0) - number(1);
    }
    Ok(unmatched)
}

/// Net of the program that stores nothing.
struct Net<'a> {
    store: &'a Store,
    /// On one CPU, and on each of two at once.
    nanos: Vec<f64>,
    /// How much of that it is what the table costs.
    table: Vec<f64>,
}

fn net(stores: &[Store], columns: usize) -> Vec<Net<'_>> {
    let [empty, table, ..] = stores else { return Vec::new() };
    let net = |store: &Store, cpus| store.median(cpus) - empty.median(cpus);
    let columns = 1..=columns;
    let rows = stores.iter().skip(1).map(|store| Net {
        store,
        nanos: columns.clone().map(|cpus| net(store, cpus)).collect(),
        table: columns.clone().map(|cpus| net(table, cpus) / net(store, cpus)).collect(),
    });
    rows.collect()
}

fn print_table(rows: &[Net<'_>], rounds: usize) {
    println!("In-flight store: ns for a start and its end, net of an empty program (medians of {rounds} rounds)");
    println!("{:<24} {:>8} {:>12} {:>14} {:>14}", "", "1 CPU", "2 CPUs", "table/it 1", "table/it 2");
    for Net { store, nanos, table } in rows {
        let column =
            |values: &[f64], n: usize, of: &dyn Fn(f64) -> String| values.get(n).map_or("-".into(), |&v| of(v));
        let time = |v: f64| format!("{v:.1}");
        let ratio = |v: f64| if v == 1.0 { String::new() } else { format!("1/{:.1}", 1.0 / v) };
        println!(
            "{:<24} {:>8} {:>12} {:>14} {:>14}",
            store.title,
            column(nanos, 0, &time),
            column(nanos, 1, &time),
            column(table, 0, &ratio),
            column(table, 1, &ratio)
        );
    }
}

fn print_json(rows: &[Net<'_>]) {
    let columns = ["one_cpu", "two_cpus"];
    let mut line = json!({ "benchmark": "store", "kernel": kernel(), "unit": "ns" });
    for (n, column) in columns.into_iter().enumerate() {
        for Net { store, nanos, table } in rows {
            line[column][store.name] = nanos.get(n).map(|v| (v * 100.0).round() / 100.0).into();
            if store.name == "hash" {
                line["table_to_hash"][column] = table.get(n).map(|v| (v * 10_000.0).round() / 10_000.0).into();
            }
        }
    }
    println!("{line}");
}

fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    libbpf_rs::set_print(None);
    let object = compile::object("store")?;
    let (mut stores, progress) = match load(&object, arguments.millis) {
        Ok(loaded) => loaded,
        Err(why) => {
            if arguments.json {
                println!("{}", json!({ "benchmark": "store", "kernel": kernel(), "not_measured": why }));
            } else {
                println!("In-flight store: not measured: {why}");
            }
            return Ok(());
        }
    };
    let cpus = two_cpus()?;
    for _ in 0..arguments.rounds {
        for store in &mut stores {
            for n in 1..=cpus.len() {
                let times = round(store.program.as_fd(), store.repeat, &cpus[..n])?;
                store.times.entry(n).or_default().extend(times);
            }
        }
    }
    let unmatched = unmatched(&progress)?;
    if unmatched > 0 {
        return Err(format!("{unmatched} ends didn't find their start").into());
    }
    let rows = net(&stores, cpus.len());
    if arguments.json {
        print_json(&rows);
        return Ok(());
    }
    print_table(&rows, arguments.rounds);
    if cpus.len() < 2 {
        println!("Two CPUs at once: not measured: this process may use one only");
    }
    let hash = rows.iter().find(|row| row.store.name == "hash").and_then(|row| row.table.first().copied());
    let reached = hash.filter(|&ratio| ratio <= TO_REACH);
    let verdict = if reached.is_some() { "reached" } else { "NOT reached" };
    println!("To reach on one CPU: 1/{:.0} of the hash map: {verdict}", 1.0 / TO_REACH);
    Ok(())
}
