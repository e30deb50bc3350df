//! What `watch` prints: a table for people, or JSON for programs.

use std::io::{self, BufWriter, Stdout, Write as _};

use dwell::{LatencyEvent, Ledger};
use serde_json::{Map, Value, json};

/// Writes to stdout, and keeps a handful of lines back until there is time to show them.
pub struct Output {
    json: bool,
    out: BufWriter<Stdout>,
}

impl Output {
    pub fn new(json: bool) -> io::Result<Self> {
        let mut out = BufWriter::new(io::stdout());
        if !json {
            writeln!(
                out,
                "{:<24} {:>12} {:>7} {:<16} {:>7} {:>11} {:>18} {:>6}",
                "SPAN", "LATENCY", "TID", "COMM", "CPU", "RET", "SKB", "LEN"
            )?;
        }
        Ok(Self { json, out })
    }

    pub fn event(&mut self, event: &LatencyEvent) -> io::Result<()> {
        if self.json { writeln!(self.out, "{}", to_json(event)) } else { self.row(event) }
    }

    fn row(&mut self, event: &LatencyEvent) -> io::Result<()> {
        let cpu = match (event.cpu_start, event.cpu_end) {
            (start, end) if start == end => start.to_string(),
            (start, end) => format!("{start}->{end}"),
        };
        let ret = event.ret.map_or_else(|| "-".to_owned(), |ret| ret.to_string());
        let skb = event.skb.map_or_else(|| "-".to_owned(), |skb| format!("{:#x}", skb.address));
        let len = event.skb.map_or_else(|| "-".to_owned(), |skb| skb.len.to_string());
        let latency = format!("{:?}", event.latency);
        writeln!(
            self.out,
            "{:<24} {latency:>12} {:>7} {:<16} {cpu:>7} {ret:>11} {skb:>18} {len:>6}",
            event.span, event.tid, event.comm
        )
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// The last thing to print.
    pub fn ledger(&mut self, ledger: &Ledger) -> io::Result<()> {
        if self.json {
            let spans: Map<String, Value> = ledger
                .spans
                .iter()
                .map(|account| {
                    let counters = account.counters().map(|(name, count)| (name.to_owned(), json!(count)));
                    (account.span.to_string(), Value::Object(counters.collect()))
                })
                .collect();
            writeln!(self.out, "{}", json!({ "ledger": spans }))?;
        } else {
            writeln!(self.out, "\n{ledger}")?;
        }
        self.out.flush()
    }
}

fn to_json(event: &LatencyEvent) -> Value {
    json!({
        "span": event.span.as_str(),
        "latency_ns": u64::try_from(event.latency.as_nanos()).unwrap_or(u64::MAX),
        "start_ns": event.start.as_nanos(),
        "pid": event.pid,
        "tid": event.tid,
        "comm": event.comm.to_string_lossy(),
        "cpu_start": event.cpu_start,
        "cpu_end": event.cpu_end,
        "ret": event.ret,
        "skb": event.skb.map(|skb| skb.address),
        "len": event.skb.map(|skb| skb.len),
    })
}
