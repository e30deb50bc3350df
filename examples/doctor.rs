//! What can be measured on this machine, and if something can't, why and what to do.
//!
//! `sudo target/debug/examples/doctor`

use std::io::{self, Write as _};
use std::process::ExitCode;

use clap::Parser;
use dwell::Support;
use serde_json::{Map, Value, json};

/// Says what can be measured on this machine, by this user, and if something can't, why and what to do.
///
/// Exit status: 0 if functions can be traced; 1 if only packets can be followed, by raw tracepoints; 2 if neither; 3 if
/// it wasn't asked properly, or can't write.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(3) } else { ExitCode::SUCCESS };
        }
    };
    let support = Support::probe();
    let text = if arguments.json { to_json(&support).to_string() } else { support.to_string() };
    if let Err(error) = writeln!(io::stdout(), "{text}") {
        eprintln!("doctor: {error}");
        return ExitCode::from(3);
    }
    match (support.can_trace_functions(), support.can_trace_packets()) {
        (true, _) => ExitCode::SUCCESS,
        (false, true) => ExitCode::from(1),
        (false, false) => ExitCode::from(2),
    }
}

fn to_json(support: &Support) -> Value {
    let checks: Map<String, Value> = support
        .checks()
        .iter()
        .map(|check| {
            let value = json!({ "answer": check.answer.as_str(), "cause": check.cause, "remedy": check.remedy });
            (check.feature.name().to_owned(), value)
        })
        .collect();
    json!({
        "kernel": support.kernel(),
        "architecture": support.architecture(),
        "checks": checks,
        "functions": support.can_trace_functions(),
        "packets": support.can_trace_packets(),
    })
}
