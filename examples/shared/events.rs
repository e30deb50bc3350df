//! Events, and times, as JSON.

use std::time::Duration;

use dwell::{CpuContext, DropReason, Identity, LatencyEvent, Outcome, Story};
use serde_json::{Value, json};

/// An event as an object. What isn't known is null.
pub fn to_json(event: &LatencyEvent) -> Value {
    json!({
        "span": event.span.as_str(),
        "ended_at": event.ended_at.as_str(),
        "outcome": event.outcome.as_str(),
        "reason": reason(&event.outcome),
        "dropped_by": match event.outcome {
            Outcome::Dropped { by, .. } => by.map(|function| function.as_str()),
            _ => None,
        },
        "latency_ns": nanos(event.latency),
        "start_ns": event.start.as_nanos(),
        "key": event.key.to_string(),
        "pid": event.pid,
        "tid": event.tid,
        "comm": event.comm.to_string_lossy(),
        "cpu_start": event.cpu_start,
        "cpu_end": event.cpu_end,
        "ret": event.ret,
        "skb": event.skb.map(|skb| skb.address),
        "len": event.skb.and_then(|skb| skb.len),
        "packet": event.identity.as_ref().map(packet),
        "story": event.story.as_deref().map(story),
    })
}

/// What the kernel was doing; null where that isn't known.
fn story(story: &Story) -> Value {
    let stack: Vec<_> = story.stack.frames().iter().map(ToString::to_string).collect();
    json!({
        "context": story.context.map(CpuContext::as_str),
        "switches": story.switches,
        "stack": stack,
        "stack_is_cut": story.stack.is_cut(),
    })
}

/// Whose packet it is; null where that isn't known.
fn packet(packet: &Identity) -> Value {
    json!({
        "ip_version": packet.ip_version(),
        "protocol": packet.protocol(),
        "source": packet.source(),
        "source_port": packet.source_port(),
        "destination": packet.destination(),
        "destination_port": packet.destination_port(),
        "local_port": packet.local_port(),
        "remote_port": packet.remote_port(),
        "dscp": packet.dscp(),
        "ttl": packet.ttl(),
        "vlan": packet.vlan(),
        "len": packet.len(),
        "tcp_flags": packet.tcp_flags(),
        "tcp_sequence": packet.tcp_sequence(),
        "interface": packet.interface(),
        "received_on": packet.received_on(),
        "netns": packet.netns(),
        "mark": packet.mark(),
        "hash": packet.hash(),
        "queue": packet.queue(),
        "cgroup": packet.cgroup(),
        "socket_cookie": packet.socket_cookie(),
    })
}

/// The kernel's name for why it dropped the packet, or else its number.
fn reason(outcome: &Outcome) -> Value {
    match outcome {
        Outcome::Dropped { reason: Some(DropReason { name: Some(name), .. }), .. } => json!(name.as_str()),
        Outcome::Dropped { reason: Some(DropReason { code, .. }), .. } => json!(code),
        _ => Value::Null,
    }
}

/// As far as JSON's numbers are read everywhere.
pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
