//! Bytes of the ring buffer → [`LatencyEvent`]. Pure: no kernel, no clock, any input.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use crate::event::{Comm, DropReason, EventKey, Flow, LatencyEvent, MonotonicTime, Name, Outcome, Skb};
use crate::kernel::Return;
use crate::span::Key;
use crate::wire::{self, KeyedRecord, RawFlow, Record, outcome};

/// What reading a probe's records takes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Codec {
    pub(crate) spans: Vec<SpanCodec>,
    /// The running kernel's names of the reasons for which it drops packets.
    pub(crate) drop_reasons: BTreeMap<u32, Name>,
}

/// What reading a span's records takes.
#[derive(Debug, Clone)]
pub(crate) struct SpanCodec {
    pub(crate) name: Name,
    pub(crate) key: Key,
    /// Whether the packet's length is read at the start.
    pub(crate) has_len: bool,
    /// Whether its pairs may be in doubt.
    pub(crate) doubted: bool,
    /// The places where it may end.
    pub(crate) parts: Vec<PartCodec>,
}

/// A place where a span may end.
#[derive(Debug, Clone)]
pub(crate) struct PartCodec {
    pub(crate) name: Name,
    pub(crate) ret: Return,
}

/// Why some bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Undecodable {
    #[error("the record has {0} bytes")]
    Size(usize),
    #[error("there is no span number {0}")]
    Span(u32),
    #[error("the span has no part number {0}")]
    Part(u32),
    /// The kernel side rules it out; a difference of times that came out negative would look like this.
    #[error("a latency of {0} ns")]
    Latency(u64),
    #[error("outcome number {0}")]
    Outcome(u32),
    #[error("a flow of IP version {0}")]
    Flow(u8),
}

/// A record, read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// The span's index in its probe.
    pub(crate) span: usize,
    /// Whether the start may be another call's. If not, the pair is certain.
    pub(crate) suspect: bool,
    pub(crate) event: LatencyEvent,
}

impl Codec {
    /// Decodes the record of one finished span.
    pub(crate) fn decode(&self, bytes: &[u8]) -> Result<Decoded, Undecodable> {
        if let Some(record) = wire::from_bytes(bytes) {
            return self.event(&record, |_| Ok((EventKey::Call, Outcome::Completed)));
        }
        let keyed: KeyedRecord = wire::from_bytes(bytes).ok_or(Undecodable::Size(bytes.len()))?;
        self.event(&keyed.record, |span| Ok((event_key(span.key, keyed.key, &keyed.flow)?, self.outcome(&keyed)?)))
    }

    fn event(
        &self,
        record: &Record,
        what: impl FnOnce(&SpanCodec) -> Result<(EventKey, Outcome), Undecodable>,
    ) -> Result<Decoded, Undecodable> {
        let span = self.spans.get(record.span as usize).ok_or(Undecodable::Span(record.span))?;
        let part = span.parts.get(record.part as usize).ok_or(Undecodable::Part(record.part))?;
        if record.latency_ns > i64::MAX as u64 {
            return Err(Undecodable::Latency(record.latency_ns));
        }
        let (key, outcome) = what(span)?;
        let event = LatencyEvent {
            span: span.name.clone(),
            ended_at: part.name.clone(),
            outcome,
            key,
            start: MonotonicTime::from_nanos(record.start_ns),
            latency: Duration::from_nanos(record.latency_ns),
            pid: record.pid,
            tid: record.tid,
            comm: Comm::from_bytes(record.comm),
            cpu_start: record.cpu_start,
            cpu_end: record.cpu_end,
            ret: return_value(record.ret, part.ret),
            skb: (record.skb != 0).then(|| Skb::new(record.skb, span.has_len.then_some(record.len))),
        };
        Ok(Decoded { span: record.span as usize, suspect: record.suspect != 0, event })
    }

    fn outcome(&self, keyed: &KeyedRecord) -> Result<Outcome, Undecodable> {
        Ok(match keyed.outcome {
            outcome::REACHED => Outcome::Completed,
            outcome::DROPPED => Outcome::Dropped { reason: self.drop_reason(keyed.reason) },
            outcome::CONSUMED => Outcome::Consumed,
            outcome::RELEASED => Outcome::Released,
            other => return Err(Undecodable::Outcome(other)),
        })
    }

    /// 0 is "not dropped yet", and what is left where a kernel gives no reasons.
    fn drop_reason(&self, code: u32) -> Option<DropReason> {
        (code != 0).then(|| DropReason { code, name: self.drop_reasons.get(&code).cloned() })
    }
}

fn event_key(key: Key, raw: u64, flow: &RawFlow) -> Result<EventKey, Undecodable> {
    Ok(match key {
        Key::Call => EventKey::Call,
        Key::Skb => EventKey::Skb(raw),
        Key::SkbHead => EventKey::SkbHead(raw),
        Key::Sock => EventKey::Sock(raw),
        Key::Flow | Key::FlowReply => EventKey::Flow(flow_of(flow)?),
        // See key_of_thread() in hook.bpf.c.
        Key::Thread if raw >> 32 == 1 => EventKey::Thread(raw as u32),
        Key::Thread => EventKey::Idle(raw as u32),
    })
}

fn flow_of(flow: &RawFlow) -> Result<Flow, Undecodable> {
    let ip = |bytes: [u8; 16]| match flow.version {
        4 => Ok(IpAddr::from(Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]))),
        6 => Ok(IpAddr::from(Ipv6Addr::from(bytes))),
        other => Err(Undecodable::Flow(other)),
    };
    let source = SocketAddr::new(ip(flow.saddr)?, u16::from_be_bytes(flow.sport));
    let destination = SocketAddr::new(ip(flow.daddr)?, u16::from_be_bytes(flow.dport));
    Ok(Flow::new(flow.protocol, source, destination))
}

/// The value in a 64-bit register, of which a narrower type only defines the low bytes.
fn return_value(register: u64, ty: Return) -> Option<i64> {
    let Return::Number { bytes, signed } = ty else { return None };
    let unused = 64 - 8 * bytes.clamp(1, 8);
    let high = register << unused;
    Some(if signed { (high as i64) >> unused } else { (high >> unused) as i64 })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INT: Return = Return::Number { bytes: 4, signed: true };

    fn codec() -> Codec {
        let span = |name: &str, key, parts: &[(&str, Return)]| SpanCodec {
            name: name.into(),
            key,
            has_len: true,
            doubted: true,
            parts: parts.iter().map(|&(name, ret)| PartCodec { name: name.into(), ret }).collect(),
        };
        Codec {
            spans: vec![
                span("ip_rcv", Key::Call, &[("ip_rcv", INT)]),
                span("tcp_v4_send_check", Key::Call, &[("tcp_v4_send_check", Return::Void)]),
                span("queued", Key::Skb, &[("tp:a", Return::Void), ("tp:kfree_skb", Return::Void)]),
                span("flow", Key::Flow, &[("b", Return::Void)]),
                span("thread", Key::Thread, &[("c", Return::Void)]),
            ],
            drop_reasons: BTreeMap::from([(8, "NETFILTER_DROP".into())]),
        }
    }

    fn decode(bytes: &[u8]) -> Result<Decoded, Undecodable> {
        codec().decode(bytes)
    }

    fn record() -> Record {
        Record {
            start_ns: 1_000,
            latency_ns: 5_000_000_000_000,
            ret: 0xdead_beef_ffff_fff5,
            skb: 0xffff_8880_0000_1000,
            span: 0,
            part: 0,
            pid: 10,
            tid: 11,
            cpu_start: 1,
            cpu_end: 2,
            len: 84,
            suspect: 1,
            comm: *b"ping\0\0\0\0\0\0\0\0\0\0\0\0",
        }
    }

    /// The record's bytes, as the kernel writes them: the members in order, in the machine's byte order.
    fn bytes(record: &Record) -> Vec<u8> {
        let Record { start_ns, latency_ns, ret, skb, span, part, pid, tid, cpu_start, cpu_end, len, suspect, comm } =
            *record;
        let mut bytes: Vec<u8> = [start_ns, latency_ns, ret, skb].into_iter().flat_map(u64::to_ne_bytes).collect();
        bytes.extend([span, part, pid, tid, cpu_start, cpu_end, len, suspect].into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend(comm);
        bytes
    }

    /// Every field arrives where it belongs.
    #[test]
    fn decodes_every_field() {
        let event = LatencyEvent {
            span: "ip_rcv".into(),
            ended_at: "ip_rcv".into(),
            outcome: Outcome::Completed,
            key: EventKey::Call,
            start: MonotonicTime::from_nanos(1_000),
            latency: Duration::from_secs(5_000),
            pid: 10,
            tid: 11,
            comm: Comm::from_bytes(record().comm),
            cpu_start: 1,
            cpu_end: 2,
            ret: Some(-11),
            skb: Some(Skb::new(0xffff_8880_0000_1000, Some(84))),
        };
        assert_eq!(decode(&bytes(&record())), Ok(Decoded { span: 0, suspect: true, event }));
    }

    fn keyed(span: u32, key: u64, outcome: u32, reason: u32, flow: &[u8; 40]) -> Vec<u8> {
        let mut bytes = bytes(&Record { span, suspect: 0, ..record() });
        bytes.extend(key.to_ne_bytes());
        bytes.extend([outcome, reason].into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend(flow);
        bytes
    }

    /// What a key adds arrives: which key, how it ended, why a packet was dropped.
    #[test]
    fn decodes_keys() {
        let none = [0; 40];
        let event = |bytes: &[u8]| decode(bytes).unwrap().event;
        let queued = event(&keyed(2, 0xabc, outcome::REACHED, 8, &none));
        assert_eq!((queued.key, queued.outcome), (EventKey::Skb(0xabc), Outcome::Completed));
        let reason = |code| match event(&keyed(2, 0xabc, outcome::DROPPED, code, &none)).outcome {
            Outcome::Dropped { reason } => reason.map(|reason| (reason.code, reason.name.map(|name| name.to_string()))),
            other => panic!("{other:?}"),
        };
        assert_eq!(reason(8), Some((8, Some("NETFILTER_DROP".to_owned()))));
        assert_eq!(reason(9), Some((9, None)));
        assert_eq!(reason(0), None);
        assert_eq!(event(&keyed(2, 1, outcome::CONSUMED, 0, &none)).outcome, Outcome::Consumed);
        assert_eq!(event(&keyed(2, 1, outcome::RELEASED, 0, &none)).outcome, Outcome::Released);
        assert_eq!(event(&keyed(4, 1 << 32 | 17, 0, 0, &none)).key, EventKey::Thread(17));
        assert_eq!(event(&keyed(4, 2 << 32 | 1, 0, 0, &none)).key, EventKey::Idle(1));
        assert_eq!(decode(&keyed(2, 1, 4, 0, &none)), Err(Undecodable::Outcome(4)));
        assert_eq!(decode(&keyed(5, 1, 0, 0, &none)), Err(Undecodable::Span(5)));
        let part = bytes(&Record { part: 1, ..record() });
        assert_eq!(decode(&part), Err(Undecodable::Part(1)));
    }

    /// Addresses of both versions, and ports in network byte order.
    #[test]
    fn decodes_flows() {
        let mut raw = [0; 40];
        raw[..4].copy_from_slice(&[10, 0, 0, 1]);
        raw[16..20].copy_from_slice(&[10, 0, 0, 2]);
        raw[32..36].copy_from_slice(&[0x01, 0xbb, 0x9c, 0x40]);
        (raw[36], raw[37]) = (4, 6);
        let text = |raw: &[u8; 40]| decode(&keyed(3, 3, 0, 0, raw)).unwrap().event.key.to_string();
        assert_eq!(text(&raw), "tcp 10.0.0.1:443 > 10.0.0.2:40000");
        raw[36] = 6;
        assert_eq!(text(&raw), "tcp [a00:1::]:443 > [a00:2::]:40000");
        raw[36] = 5;
        assert_eq!(decode(&keyed(3, 3, 0, 0, &raw)), Err(Undecodable::Flow(5)));
    }

    /// A void function returns nothing, whatever the register holds; a NULL packet is none.
    #[test]
    fn leaves_out_what_is_not_there() {
        let record = Record { span: 1, skb: 0, suspect: 0, ..record() };
        let Decoded { span, suspect, event } = decode(&bytes(&record)).unwrap();
        assert_eq!((span, suspect, event.ret, event.skb), (1, false, None, None));
    }

    /// No latency is wrapped, cut to 32 bits or rounded; what can't be one is refused.
    #[test]
    fn latencies_are_64_bit() {
        let exact = [0, 1, 999, 4_294_967_295_000, 4_294_967_296_000, (1 << 32) * 1_000_000, i64::MAX as u64];
        for latency_ns in exact {
            let decoded = decode(&bytes(&Record { latency_ns, ..record() })).unwrap();
            assert_eq!(decoded.event.latency.as_nanos(), u128::from(latency_ns));
        }
        for latency_ns in [1 << 63, 5_u64.wrapping_sub(6), u64::MAX] {
            let result = decode(&bytes(&Record { latency_ns, ..record() }));
            assert_eq!(result, Err(Undecodable::Latency(latency_ns)));
        }
    }

    /// Return values are extended by their own type; the register's unused part is anything.
    #[test]
    fn return_values_by_type() {
        let number = |bytes, signed| Return::Number { bytes, signed };
        let garbage = 0xabcd_ef01_8000_80f5;
        assert_eq!(return_value(garbage, number(1, true)), Some(-11));
        assert_eq!(return_value(garbage, number(1, false)), Some(0xf5));
        assert_eq!(return_value(garbage, number(2, true)), Some(-0x7f0b));
        assert_eq!(return_value(garbage, number(2, false)), Some(0x80f5));
        assert_eq!(return_value(garbage, number(4, true)), Some(-0x7fff_7f0b));
        assert_eq!(return_value(garbage, number(4, false)), Some(0x8000_80f5));
        assert_eq!(return_value(garbage, number(8, true)), Some(garbage as i64));
        assert_eq!(return_value(garbage, number(8, false)), Some(garbage as i64));
        assert_eq!(return_value(garbage, Return::Void), None);
        assert_eq!(return_value(garbage, Return::Other), None);
        // Types that no kernel has.
        assert_eq!(return_value(garbage, number(0, false)), Some(0xf5));
        assert_eq!(return_value(garbage, number(16, true)), Some(garbage as i64));
    }

    /// Shorter and longer records are refused, and alignment doesn't matter.
    #[test]
    fn sizes_and_alignment() {
        let whole = bytes(&record());
        for len in 0..whole.len() {
            assert_eq!(decode(&whole[..len]), Err(Undecodable::Size(len)));
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(decode(&longer), Err(Undecodable::Size(81)));
        for shift in 0..8 {
            let mut shifted = vec![0; shift];
            shifted.extend(&whole);
            assert_eq!(decode(&shifted[shift..]), decode(&whole));
        }
    }

    /// A million byte strings of every kind: an event or an error, never a panic.
    #[test]
    fn takes_any_bytes() {
        let codec = codec();
        // xorshift64*, so that a failure can be repeated.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        let mut bytes = [0; 144];
        let mut decoded = 0;
        for n in 0..1_000_000 {
            for chunk in bytes.chunks_mut(8) {
                chunk.copy_from_slice(&next().to_ne_bytes());
            }
            // Half of them are records in all but their contents.
            let len = match n % 4 {
                0 => 80,
                1 => 136,
                _ => next() as usize % 145,
            };
            if n % 4 < 2 {
                bytes[32..36].copy_from_slice(&((next() % 6) as u32).to_ne_bytes());
                bytes[36..40].copy_from_slice(&((next() % 2) as u32).to_ne_bytes());
                bytes[88..92].copy_from_slice(&((next() % 5) as u32).to_ne_bytes());
                bytes[132] = 4 + (next() % 4) as u8;
                bytes[8..16].copy_from_slice(&(next() >> 1).to_ne_bytes());
            }
            if let Ok(Decoded { span, event, .. }) = codec.decode(&bytes[..len]) {
                assert_eq!(event.span, codec.spans[span].name);
                assert!(!event.to_string().is_empty());
                decoded += 1;
            }
        }
        assert!(decoded > 100_000, "only {decoded} were records");
    }
}
