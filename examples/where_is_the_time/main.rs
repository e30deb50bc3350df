//! Where does the time of received packets go? All stages of receiving side by side, and which takes most by itself.
//!
//! `sudo target/debug/examples/where_is_the_time`

#[path = "../shared/interrupt.rs"]
mod interrupt;
mod nesting;
mod report;
#[path = "../shared/traffic.rs"]
mod traffic;

use std::error::Error;
use std::io;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Parser;
use crossbeam_channel::{bounded, select};
use dwell::{LatencyEvent, LatencyProbe, Stage};

use nesting::Run;
use traffic::Traffic;

/// Shows where the time of received packets goes: every stage of receiving, sorted by the time that it takes by itself.
///
/// By default of messages to ourselves, over 127.0.0.1.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// So many by UDP, and so many by TCP
    #[arg(long, value_name = "N", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..))]
    messages: u64,

    /// Instead of sending any, watch what this machine receives anyway: for so many seconds, or until Ctrl-C
    #[arg(long, value_name = "SECONDS", conflicts_with = "messages", value_parser = clap::value_parser!(u32).range(1..))]
    duration: Option<u32>,
}

/// Events that are kept, 40 bytes each. On a busy machine the rest counts as `channel_dropped`, and the report says so.
const MOST: usize = 1 << 22;

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("where_is_the_time: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn Error>> {
    let interrupted = interrupt::interrupted()?;

    // No machine has all of them: what can't be measured here is left out, and named at the end.
    let stages = Stage::ALL.iter().filter(|stage| stage.is_receive() || report::WAITING.contains(stage));
    let builder = LatencyProbe::builder().best_effort().channel_capacity(1 << 18);
    let probe = stages.fold(builder, |builder, stage| builder.stage(*stage)).attach()?;
    let failures = probe.failures().iter().map(|failure| (failure.span.to_string(), failure.error.to_string()));
    let failures: Vec<_> = failures.collect();

    let events = probe.events().clone();
    let reader = thread::spawn(move || events.iter().take(MOST).map(to_run).collect::<Vec<_>>());
    let (finish, finished) = bounded(1);
    let &Arguments { messages, duration } = arguments;
    if let Some(seconds) = duration {
        eprintln!("measuring what this machine receives, for {seconds} s");
    }
    thread::spawn(move || {
        let _ = finish.send(match duration {
            Some(seconds) => {
                thread::sleep(Duration::from_secs(seconds.into()));
                Ok(())
            }
            None => Traffic::Udp(messages).run().and_then(|()| Traffic::Tcp(messages).run()),
        });
    });
    select! {
        recv(interrupted) -> _ => {}
        recv(finished) -> result => result??,
    }
    let ledger = probe.stop();
    let runs = reader.join().map_err(|_| "reading events failed")?;

    let mut out = io::stdout().lock();
    report::print(&mut out, &runs, &ledger)?;
    report::failures(&mut out, &failures)?;
    Ok(())
}

fn to_run(event: LatencyEvent) -> Run {
    Run {
        cpu: event.cpu_start,
        stayed: event.cpu_start == event.cpu_end,
        start: event.start.as_nanos(),
        end: event.end().as_nanos(),
        stage: event.span,
    }
}
