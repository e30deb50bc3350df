//! How long do the classifiers and actions at tc ingress hold up each received packet?
//!
//! `sudo target/debug/examples/tc_ingress`

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use dwell::{LatencyProbe, Stage};

const HOW_TO_TRY: &str = "No packet met a classifier: no device has one, or none was received. To try it on loopback:
  tc qdisc add dev lo clsact
  tc filter add dev lo ingress matchall action pass
  ping -c 3 127.0.0.1             # while this runs
  tc qdisc del dev lo clsact      # takes it all back
BPF programs attached by tcx (Linux 6.6 and later) pass no classifier, and aren't seen.";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tc_ingress: {error}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    // Whatever this kernel calls it: `tc_run`, `tcf_classify` or `tcf_classify_ingress`.
    let probe = LatencyProbe::builder().stage(Stage::TcIngress).attach()?;
    let mut out = io::stdout().lock();
    for span in probe.spans() {
        writeln!(out, "{}: calls of {}, for 10 seconds or 20 packets", span.name, span.starts.join(", "))?;
    }

    let end = Instant::now() + Duration::from_secs(10);
    let mut count = 0;
    while count < 20 {
        let Ok(event) = probe.events().recv_deadline(end) else { break };
        writeln!(out, "{event}")?;
        count += 1;
    }
    if count == 0 {
        writeln!(out, "{HOW_TO_TRY}")?;
    }

    writeln!(out, "{}", probe.stop())?;
    Ok(())
}
