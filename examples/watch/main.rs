//! Watches kernel functions, and packets on their way, from the command line: a line for each event, then histograms, if
//! they are asked for, and the ledger.
//!
//! `sudo target/debug/examples/watch --function ip_rcv --duration 10`

mod arguments;
#[path = "../shared/events.rs"]
mod events;
mod histograms;
#[path = "../shared/interrupt.rs"]
mod interrupt;
mod output;
mod stages;
#[path = "../shared/traffic.rs"]
mod traffic;

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser as _;
use crossbeam_channel::{Receiver, Sender, bounded, never, select};
use dwell::{LatencyEvent, LatencyProbe, Slowest};

use arguments::Arguments;
use output::Output;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        // --help and --version are no failures; of the rest the first paragraph says it all.
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => return fail(&first_paragraph(&error.to_string())),
    };
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

/// On one line.
fn first_paragraph(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect();
    lines.join(" ").trim_start_matches("error: ").to_owned()
}

fn fail(message: &str) -> ExitCode {
    eprintln!("watch: {message}");
    ExitCode::from(2)
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    if arguments.list_stages {
        return Ok(stages::list(arguments.json)?);
    }

    let interrupted = interrupt::interrupted()?;

    let probe = arguments.builder().attach()?;
    for failure in probe.failures() {
        eprintln!("watch: {failure}");
    }
    for span in probe.spans().iter().filter(|span| !span.lives_are_seen) {
        eprintln!(
            "watch: {}: what is measured isn't always seen to go here; what reaches the end must have passed the start",
            span.name
        );
    }
    eprintln!("attached");

    let (finish, finished) = bounded(1);
    if let Some(traffic) = arguments.traffic {
        thread::spawn(move || finish.send(traffic.run()));
    } else {
        keep_open(finish);
    }
    let mut output = if arguments.json { Output::json() } else { Output::text() };
    // Without events their channel is closed from the beginning.
    let events = if arguments.wants_events() { probe.events().clone() } else { never() };
    if arguments.wants_events() {
        output.header(probe.spans(), arguments)?;
    }
    let mut left = arguments.count;
    watch(&events, &mut output, &mut left, arguments.duration, &interrupted, &finished)?;

    // Only a running probe has these.
    let slowest = if arguments.wants_slowest() { slowest_of(&probe)? } else { Vec::new() };
    let histograms = if arguments.wants_histograms() { histograms::of(&probe)? } else { Vec::new() };
    // The rest is read while the probe stops, so that its channel can't fill up meanwhile.
    let (events, infos) = (probe.events().clone(), probe.spans().to_vec());
    let stopping = thread::spawn(move || probe.stop());
    for event in &events {
        if left.is_some_and(|left| left == 0) {
            continue;
        }
        output.event(&event)?;
        left = left.map(|left| left - 1);
    }
    if arguments.wants_slowest() {
        output.slowest(&infos, arguments, &slowest)?;
    }
    for histogram in &histograms {
        output.histogram(histogram)?;
    }
    let ledger = stopping.join().map_err(|_| "stopping the probe failed")?;
    output.ledger(&ledger)?;
    Ok(())
}

/// Of each span those that the probe has kept.
fn slowest_of(probe: &LatencyProbe) -> Result<Vec<LatencyEvent>, Box<dyn std::error::Error>> {
    let mut events = Vec::new();
    for info in probe.spans() {
        let slowest = probe.slowest(&info.name)?;
        if !slowest.is_exact() {
            let Slowest { withheld, unkept, .. } = slowest;
            eprintln!("watch: {}: of the slowest {withheld} are in doubt, and {unkept} may be missing", info.name);
        }
        events.extend(slowest.events);
    }
    Ok(events)
}

/// Without traffic nothing ever says that it is finished.
fn keep_open(finish: Sender<std::io::Result<()>>) {
    std::mem::forget(finish);
}

/// Prints events until one of the reasons to end.
fn watch(
    events: &Receiver<LatencyEvent>,
    output: &mut Output,
    left: &mut Option<u64>,
    duration: Option<Duration>,
    interrupted: &Receiver<()>,
    finished: &Receiver<std::io::Result<()>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let time_is_up = match duration.and_then(|duration| Instant::now().checked_add(duration)) {
        Some(end) => crossbeam_channel::at(end),
        None => never(),
    };
    while left.is_none_or(|left| left > 0) {
        select! {
            recv(events) -> event => {
                output.event(&event?)?;
                *left = left.map(|left| left - 1);
            }
            recv(interrupted) -> _ => break,
            recv(time_is_up) -> _ => break,
            recv(finished) -> result => return Ok(result??),
            // Nothing to do at the moment: show what there is.
            default(Duration::from_millis(100)) => output.flush()?,
        }
    }
    Ok(())
}
