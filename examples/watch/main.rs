//! Watches kernel functions from the command line: a line for each call, then the ledger.
//!
//! `sudo target/debug/examples/watch --function ip_rcv --duration 10`

mod output;
mod traffic;

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use crossbeam_channel::{Receiver, Sender, bounded, never, select};
use dwell::{LatencyEvent, LatencyProbe};

use output::Output;
use traffic::Traffic;

/// Measures how long calls of kernel functions take.
///
/// Ends after --count events, --duration seconds, when all of --traffic has been seen, or on Ctrl-C.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Kernel functions, as NAME or MODULE:NAME; can be repeated
    #[arg(long = "function", value_name = "NAME", required = true, num_args = 1..)]
    functions: Vec<String>,

    /// Print one JSON object for each event, and the ledger as the last line
    #[arg(long)]
    json: bool,

    /// End after this many events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// End after this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    duration: Option<Duration>,

    /// Once attached, send N datagrams, or N short TCP messages, to ourselves over 127.0.0.1
    #[arg(long, value_name = "udp:N|tcp:N")]
    traffic: Option<Traffic>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "a number of seconds is needed".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Events that the channel holds. With our own traffic there is room for all that it can cause: printing is slower
/// than the kernel.
fn channel_capacity(arguments: &Arguments) -> usize {
    const ROOM: u64 = 1 << 16;
    const EVENTS_PER_MESSAGE: u64 = 8;
    const MOST: u64 = 1 << 20;
    let messages = arguments.traffic.as_ref().map_or(0, |traffic| traffic.messages());
    messages.saturating_mul(EVENTS_PER_MESSAGE * arguments.functions.len() as u64).clamp(ROOM, MOST) as usize
}

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
    let (interrupt, interrupted) = bounded(1);
    ctrlc::set_handler(move || {
        let _ = interrupt.try_send(());
    })?;

    let mut builder = LatencyProbe::builder().channel_capacity(channel_capacity(arguments));
    for function in &arguments.functions {
        builder = builder.function(function);
    }
    let probe = builder.attach()?;
    eprintln!("attached");

    let (finish, finished) = bounded(1);
    if let Some(traffic) = arguments.traffic {
        thread::spawn(move || finish.send(traffic.run()));
    } else {
        keep_open(finish);
    }
    let mut output = Output::new(arguments.json)?;
    let mut left = arguments.count;
    watch(&probe, &mut output, &mut left, arguments.duration, &interrupted, &finished)?;

    // The rest is read while the probe stops, so that its channel can't fill up meanwhile.
    let events = probe.events().clone();
    let stopping = thread::spawn(move || probe.stop());
    for event in &events {
        if left.is_some_and(|left| left == 0) {
            continue;
        }
        output.event(&event)?;
        left = left.map(|left| left - 1);
    }
    let ledger = stopping.join().map_err(|_| "stopping the probe failed")?;
    output.ledger(&ledger)?;
    Ok(())
}

/// Without traffic nothing ever says that it is finished.
fn keep_open(finish: Sender<std::io::Result<()>>) {
    std::mem::forget(finish);
}

/// Prints events until one of the reasons to end.
fn watch(
    probe: &LatencyProbe,
    output: &mut Output,
    left: &mut Option<u64>,
    duration: Option<Duration>,
    interrupted: &Receiver<()>,
    finished: &Receiver<std::io::Result<()>>,
) -> Result<(), Box<dyn std::error::Error>> {
    let events: &Receiver<LatencyEvent> = probe.events();
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
