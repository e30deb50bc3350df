//! What `watch` prints: a table for people, or JSON for programs.

use std::io::{self, BufWriter, Stdout, Write as _};

use dwell::{Key, LatencyEvent, Ledger, SpanInfo};
use serde_json::{Map, Value, json};

use crate::arguments::Arguments;
use crate::events;
use crate::histograms::SpanHistogram;

/// Writes to stdout, and keeps a handful of lines back until there is time to show them.
pub struct Output {
    format: Format,
    out: BufWriter<Stdout>,
    /// Nothing has been written so far.
    is_empty: bool,
}

enum Format {
    Json,
    /// For people. Without columns there are no events.
    Text(Vec<Column>),
}

struct Column {
    title: &'static str,
    side: Side,
    width: usize,
    cell: fn(&LatencyEvent) -> String,
}

/// To which its cells are aligned.
enum Side {
    Left,
    Right,
}

impl Output {
    pub fn json() -> Self {
        Self::new(Format::Json)
    }

    pub fn text() -> Self {
        Self::new(Format::Text(Vec::new()))
    }

    fn new(format: Format) -> Self {
        Self { format, out: BufWriter::new(io::stdout()), is_empty: true }
    }

    /// Begins the table of events, with the columns that these spans have something for.
    pub fn header(&mut self, spans: &[SpanInfo], arguments: &Arguments) -> io::Result<()> {
        let Format::Text(shown) = &mut self.format else { return Ok(()) };
        *shown = columns(spans, arguments);
        self.is_empty = false;
        row(&mut self.out, shown, |column| column.title.to_owned())
    }

    pub fn event(&mut self, event: &LatencyEvent) -> io::Result<()> {
        match &self.format {
            Format::Json => writeln!(self.out, "{}", events::to_json(event)),
            Format::Text(columns) => {
                row(&mut self.out, columns, |column| (column.cell)(event))?;
                let stack = event.story.as_ref().map(|story| story.stack.to_string()).unwrap_or_default();
                stack.lines().try_for_each(|frame| writeln!(self.out, "    {frame}"))
            }
        }
    }

    /// A table of its own for the slowest spans; in JSON they are under a name of their own.
    pub fn slowest(&mut self, spans: &[SpanInfo], arguments: &Arguments, events: &[LatencyEvent]) -> io::Result<()> {
        if let Format::Json = self.format {
            return events
                .iter()
                .try_for_each(|event| writeln!(self.out, "{}", json!({ "slowest": events::to_json(event) })));
        }
        self.separate()?;
        self.header(spans, arguments)?;
        events.iter().try_for_each(|event| self.event(event))
    }

    pub fn histogram(&mut self, histogram: &SpanHistogram) -> io::Result<()> {
        self.separate()?;
        match &self.format {
            Format::Json => writeln!(self.out, "{}", histogram.to_json()),
            Format::Text(_) => writeln!(self.out, "{histogram}"),
        }
    }

    /// A blank line between what is above, if anything is, and what comes.
    fn separate(&mut self) -> io::Result<()> {
        match self.format {
            Format::Text(_) if !std::mem::take(&mut self.is_empty) => writeln!(self.out),
            _ => Ok(()),
        }
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    /// The last thing to print.
    pub fn ledger(&mut self, ledger: &Ledger) -> io::Result<()> {
        self.separate()?;
        match self.format {
            Format::Json => {
                let spans: Map<String, Value> = ledger
                    .spans
                    .iter()
                    .map(|account| {
                        let counters = account.counters().map(|(name, count)| (name.to_owned(), json!(count)));
                        (account.span.to_string(), Value::Object(counters.collect()))
                    })
                    .collect();
                writeln!(self.out, "{}", json!({ "ledger": spans }))?;
            }
            Format::Text(_) => writeln!(self.out, "{ledger}")?,
        }
        self.out.flush()
    }
}

fn columns(spans: &[SpanInfo], arguments: &Arguments) -> Vec<Column> {
    use Side::{Left, Right};
    let column = |title, side, width, cell| Column { title, side, width, cell };
    let longest = spans.iter().map(|span| span.name.len()).max().unwrap_or_default();
    let mut columns = vec![
        column("SPAN", Left, longest.max(24), |event| event.span.to_string()),
        column("LATENCY", Right, 12, |event| format!("{:?}", event.latency)),
        column("TID", Right, 7, |event| event.tid.to_string()),
        column("COMM", Left, 16, |event| event.comm.to_string()),
        column("CPU", Right, 7, |event| match (event.cpu_start, event.cpu_end) {
            (start, end) if start == end => start.to_string(),
            (start, end) => format!("{start}->{end}"),
        }),
    ];
    if spans.iter().any(|span| span.key == Key::Call) {
        columns.push(column("RET", Right, 11, |event| or_dash(event.ret.map(|ret| ret.to_string()))));
        columns.push(column("SKB", Right, 18, |event| or_dash(event.skb.map(|skb| format!("{:#x}", skb.address)))));
    }
    columns
        .push(column("LEN", Right, 6, |event| or_dash(event.skb.and_then(|skb| skb.len).map(|len| len.to_string()))));
    if spans.iter().any(|span| span.key != Key::Call) {
        columns.push(column("KEY", Left, 22, |event| event.key.to_string()));
    }
    if arguments.abandoned {
        columns.push(column("OUTCOME", Left, 9, |event| event.outcome.to_string()));
    }
    if arguments.stack {
        columns.push(column("CONTEXT", Left, 7, |event| or_dash(event.story.as_ref().map(|story| story.to_string()))));
    }
    // As wide as it comes.
    if arguments.identifies() {
        columns.push(column("PACKET", Left, 6, |event| or_dash(event.identity.map(|packet| packet.to_string()))));
    }
    columns
}

fn or_dash(cell: Option<String>) -> String {
    cell.unwrap_or_else(|| "-".to_owned())
}

fn row(out: &mut BufWriter<Stdout>, columns: &[Column], cell: impl Fn(&Column) -> String) -> io::Result<()> {
    let cells = columns.iter().map(|column| match (&column.side, column.width) {
        (Side::Left, width) => format!("{:<width$}", cell(column)),
        (Side::Right, width) => format!("{:>width$}", cell(column)),
    });
    let cells: Vec<_> = cells.collect();
    writeln!(out, "{}", cells.join(" ").trim_end())
}
