//! A packet's story, for people.

use std::io::{self, Write};

use dwell::{CpuContext, Identity, LatencyEvent};

/// Who it was, where it was for how long, and what the kernel was doing.
pub fn story(out: &mut impl Write, event: &LatencyEvent) -> io::Result<()> {
    let when = humantime::format_rfc3339_micros(event.start.to_system_time());
    writeln!(out, "{when}  {:?} in {}", event.latency, event.span)?;
    match (&event.identity, event.skb) {
        (Some(packet), _) => writeln!(out, "    packet   {packet}{}", details(packet))?,
        (None, Some(skb)) => writeln!(out, "    packet   {:#x}", skb.address)?,
        (None, None) => {}
    }
    writeln!(out, "    ended    at {} {}", event.ended_at, whereabouts(event))?;
    let Some(story) = &event.story else { return writeln!(out) };
    for (n, frame) in story.stack.to_string().lines().enumerate() {
        let label = if n == 0 { "stack" } else { "" };
        writeln!(out, "    {label:8} {frame}")?;
    }
    writeln!(out)
}

/// What else is known of a packet.
fn details(packet: &Identity) -> String {
    let mut text = String::new();
    let mut add = |what: &str, value: Option<String>| {
        if let Some(value) = value {
            text.push_str(&format!(" {what} {value}"));
        }
    };
    add("len", packet.len().map(|len| len.to_string()));
    add("dscp", packet.dscp().filter(|dscp| *dscp != 0).map(|dscp| dscp.to_string()));
    add("mark", packet.mark().filter(|mark| *mark != 0).map(|mark| format!("{mark:#x}")));
    add("from if", packet.received_on().map(|index| index.to_string()));
    add("cgroup", packet.cgroup().map(|id| id.to_string()));
    text
}

/// On which CPU it ended, in whose name, and whether whoever it was had to wait.
fn whereabouts(event: &LatencyEvent) -> String {
    let LatencyEvent { cpu_start, cpu_end, comm, tid, story, .. } = event;
    let mut text = format!("on CPU {cpu_end}");
    if cpu_start != cpu_end {
        text.push_str(&format!(" (it started on CPU {cpu_start})"));
    }
    let story = story.as_deref();
    match story.and_then(|story| story.context) {
        Some(CpuContext::Task) => text.push_str(&format!(", by {comm}/{tid}")),
        Some(CpuContext::Idle) => text.push_str(", which was idle"),
        Some(interrupt) => text.push_str(&format!(", in a {interrupt} on top of {comm}/{tid}")),
        None => text.push_str(&format!(", while {comm}/{tid} was running")),
    }
    match story.and_then(|story| story.switches) {
        Some(0) | None => {}
        Some(1) => text.push_str(", which was switched out once"),
        Some(switches) => text.push_str(&format!(", which was switched out {switches} times")),
    }
    text
}
