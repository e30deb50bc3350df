//! What a probe takes in memory: in the kernel, in the process, and whether a cgroup of 64 MiB is enough.
//!
//! Natively where functions can be traced, or in a guest: `scripts/vm 6.12 -- PATH_OF_THE_PROGRAM`. Where functions can't
//! be traced, spans between tracepoints can.

#![allow(missing_docs, reason = "a program")]

mod cgroup;
mod kernel;
mod process;

use std::error::Error;
use std::path::PathBuf;

use cgroup::Cgroup;
use clap::Parser;
use dwell::{Answer, Feature, Support};
use process::{Found, Shape, start};
use serde_json::json;

#[derive(Parser)]
struct Arguments {
    /// One line of JSON instead of the table
    #[arg(long)]
    json: bool,
    /// Datagrams that are sent, so that there are events to read
    #[arg(long, default_value_t = 20_000)]
    datagrams: u32,
    /// The size of the cgroup, in MiB, in which a default probe has to fit, with its process
    #[arg(long, default_value_t = 64)]
    limit: u64,
    /// Have this probe, and say what it takes: what this program starts itself for
    #[arg(long, hide = true)]
    shape: Option<Shape>,
    #[arg(long, hide = true)]
    cgroup: Option<PathBuf>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// One span alone, two of the same kind, and one of which no events are wanted.
struct Kind {
    title: &'static str,
    name: &'static str,
    one: Found,
    two: Found,
    silent: Found,
}

impl Kind {
    fn measure(title: &'static str, name: &'static str, shapes: [Shape; 3], n: u32) -> Result<Self, Box<dyn Error>> {
        let [one, two, silent] = shapes;
        let start = |shape| start(shape, None, n);
        Ok(Self { title, name, one: start(one)?, two: start(two)?, silent: start(silent)? })
    }

    /// What one span more takes in the kernel, in bytes.
    fn span(&self) -> u64 {
        self.two.in_kernel().saturating_sub(self.one.in_kernel())
    }

    /// What there is of a probe besides its spans.
    fn probe(&self) -> u64 {
        self.one.in_kernel().saturating_sub(self.span())
    }

    /// The same where no events are wanted.
    fn silent_probe(&self) -> u64 {
        self.silent.in_kernel().saturating_sub(self.span())
    }

    fn per_cpu(&self) -> u64 {
        self.two.per_cpu().saturating_sub(self.one.per_cpu())
    }
}

/// Whether a default probe fits into a cgroup.
struct Fit {
    /// Of the cgroup, in MiB.
    limit: u64,
    fits: bool,
    /// The most that it took, in bytes, or would take.
    most: Option<u64>,
    how: How,
}

enum How {
    /// With a cgroup, which was at its limit so many times.
    Tested { at_limit: u64 },
    /// Added up, because there can't be such a cgroup, for this reason.
    Computed { why: String },
}

impl Fit {
    fn find(limit: u64, shape: Shape, found: &Found, datagrams: u32) -> Result<Self, Box<dyn Error>> {
        // Before 5.11 it counts against the limit of locked memory instead.
        let counts = kernel_is_at_least(5, 11);
        let bytes = limit << 20;
        let cgroup =
            if counts { Cgroup::new(bytes) } else { Err("this kernel's cgroups don't count BPF's memory".into()) };
        let cgroup = match cgroup {
            Ok(cgroup) => cgroup,
            Err(why) => {
                // The pages of the ring that are mapped are in both, so it is less than that.
                let most = found.in_kernel() + found.peak;
                return Ok(Self { limit, fits: most <= bytes, most: Some(most), how: How::Computed { why } });
            }
        };
        let result = start(shape, Some(cgroup.path()), datagrams);
        let (at_limit, killed) = cgroup.events()?;
        if let Err(error) = &result {
            eprintln!("in the cgroup: {error}");
        }
        let fits = result.is_ok() && killed == 0;
        Ok(Self { limit, fits, most: cgroup.peak(), how: How::Tested { at_limit } })
    }
}

fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn kernel_is_at_least(major: u32, minor: u32) -> bool {
    let release = kernel();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (major, minor)
}

fn kib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 10)
}

fn print_table(kinds: &[Kind], why_no_functions: Option<&str>, fit: &Fit, cpus: usize) {
    println!("Memory of a probe with default settings, KiB (Linux {}, {cpus} possible CPUs)", kernel());
    println!("{:<28} {:>10} {:>12} {:>14}", "in the kernel", "the probe", "each span", "of it per CPU");
    for kind in kinds {
        let Kind { title, one, .. } = kind;
        println!("{title:<28} {:>10} {:>12} {:>14}", kib(kind.probe()), kib(kind.span()), kib(kind.per_cpu()));
        println!("{:<28} {:>10}", "  without events", kib(kind.silent_probe()));
        let mut items: Vec<_> = one.kernel.iter().collect();
        items.sort_by_key(|item| std::cmp::Reverse(item.bytes));
        let items: Vec<_> = items.iter().map(|item| format!("{} {}", item.name, kib(item.bytes))).collect();
        println!("  one: {}", items.join(", "));
    }
    if let Some(why) = why_no_functions {
        println!("functions: not measured: {why}");
    }
    println!("{:<28} {:>10} {:>12} {:>14}", "resident in the process", "before", "attached", "after events");
    for Kind { title, one, silent, .. } in kinds {
        for (title, found) in [(*title, one), ("  without events", silent)] {
            let [before, attached, after] = found.resident.map(kib);
            let Found { events, completed, .. } = found;
            println!("{title:<28} {before:>10} {attached:>12} {after:>14}  ({events} events of {completed} spans)");
        }
    }
    let Fit { limit, fits, most, how } = fit;
    let verdict = if *fits { "fits" } else { "does NOT fit" };
    let most = most.map_or_else(|| "unknown before Linux 5.19".into(), |most| format!("{} KiB", kib(most)));
    let how = match how {
        How::Tested { at_limit } => format!("tested; at its limit {at_limit} times"),
        How::Computed { why } => format!("computed, not tested: {why}"),
    };
    println!("A cgroup of {limit} MiB: {verdict}; the most that is taken: {most} ({how})");
}

fn print_json(kinds: &[Kind], why_no_functions: Option<&str>, fit: &Fit, cpus: usize) {
    let mut line = json!({
        "benchmark": "memory",
        "kernel": kernel(),
        "unit": "KiB",
        "possible_cpus": cpus,
        "cgroup": {
            "mib": fit.limit,
            "fits": fit.fits,
            "tested": matches!(fit.how, How::Tested { .. }),
            "most": fit.most.map(kib),
        },
    });
    for kind in kinds {
        let resident = |found: &Found| {
            let [before, attached, after] = found.resident.map(kib);
            json!({ "before": before, "attached": attached, "after": after })
        };
        line[kind.name] = json!({
            "probe": kib(kind.probe()),
            "probe_without_events": kib(kind.silent_probe()),
            "span": kib(kind.span()),
            "span_per_cpu": kib(kind.per_cpu()),
            "resident": resident(&kind.one),
            "resident_without_events": resident(&kind.silent),
        });
    }
    if let Some(why) = why_no_functions {
        line["functions_not_measured"] = why.into();
    }
    println!("{line}");
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::parse();
    let datagrams = arguments.datagrams;
    if let Some(shape) = arguments.shape {
        return process::run(shape, arguments.cgroup, datagrams);
    }
    let support = Support::probe();
    let mut kinds = vec![Kind::measure(
        "spans between tracepoints",
        "spans",
        [Shape::Span, Shape::TwoSpans, Shape::SpanWithoutEvents],
        datagrams,
    )?];
    let mut why_no_functions = None;
    if support.can_trace_functions() {
        let shapes = [Shape::Function, Shape::TwoFunctions, Shape::FunctionWithoutEvents];
        kinds.insert(0, Kind::measure("functions", "functions", shapes, datagrams)?);
    } else {
        let needed = [Feature::Btf, Feature::Trampolines, Feature::RingBuffer];
        let missing = needed.into_iter().filter_map(|feature| support.get(feature)).find(|it| it.answer != Answer::Yes);
        why_no_functions = missing.map(|check| check.cause.clone());
    }
    let shape = if why_no_functions.is_none() { Shape::Function } else { Shape::Span };
    let fit = Fit::find(arguments.limit, shape, &kinds[0].one, datagrams)?;
    let cpus = kernel::possible_cpus()?;
    let print = if arguments.json { print_json } else { print_table };
    print(&kinds, why_no_functions.as_deref(), &fit, cpus);
    Ok(())
}
