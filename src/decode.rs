//! Bytes of the ring buffer → [`LatencyEvent`]. Pure: no kernel, no clock, any input.

use std::time::Duration;

use crate::event::{Comm, LatencyEvent, MonotonicTime, Skb, SpanName};
use crate::kernel::Return;
use crate::wire::Record;

/// What reading a span's records takes.
#[derive(Debug, Clone)]
pub(crate) struct SpanKind {
    pub(crate) name: SpanName,
    pub(crate) ret: Return,
}

/// Why some bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Undecodable {
    #[error("the record has {0} bytes")]
    Size(usize),
    #[error("there is no span number {0}")]
    Span(u32),
    /// The kernel side rules it out; a difference of times that came out negative would look like this.
    #[error("a latency of {0} ns")]
    Latency(u64),
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

/// Decodes the record of one finished span; `spans` are the probe's.
pub(crate) fn decode(bytes: &[u8], spans: &[SpanKind]) -> Result<Decoded, Undecodable> {
    let record = Record::from_bytes(bytes).ok_or(Undecodable::Size(bytes.len()))?;
    let span = spans.get(record.span as usize).ok_or(Undecodable::Span(record.span))?;
    if record.latency_ns > i64::MAX as u64 {
        return Err(Undecodable::Latency(record.latency_ns));
    }
    let event = LatencyEvent {
        span: span.name.clone(),
        start: MonotonicTime::from_nanos(record.start_ns),
        latency: Duration::from_nanos(record.latency_ns),
        pid: record.pid,
        tid: record.tid,
        comm: Comm::from_bytes(record.comm),
        cpu_start: record.cpu_start,
        cpu_end: record.cpu_end,
        ret: return_value(record.ret, span.ret),
        skb: (record.skb != 0).then(|| Skb::new(record.skb, record.len)),
    };
    Ok(Decoded { span: record.span as usize, suspect: record.suspect != 0, event })
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

    fn spans() -> Vec<SpanKind> {
        vec![
            SpanKind { name: "ip_rcv".into(), ret: INT },
            SpanKind { name: "tcp_v4_send_check".into(), ret: Return::Void },
        ]
    }

    fn record() -> Record {
        Record {
            start_ns: 1_000,
            latency_ns: 5_000_000_000_000,
            ret: 0xdead_beef_ffff_fff5,
            skb: 0xffff_8880_0000_1000,
            span: 0,
            pid: 10,
            tid: 11,
            cpu_start: 1,
            cpu_end: 2,
            len: 84,
            suspect: 1,
            reserved: 0,
            comm: *b"ping\0\0\0\0\0\0\0\0\0\0\0\0",
        }
    }

    /// The record's bytes, as the kernel writes them: the members in order, in the machine's byte order.
    fn bytes(record: &Record) -> Vec<u8> {
        let Record { start_ns, latency_ns, ret, skb, span, pid, tid, cpu_start, cpu_end, len, suspect, reserved, comm } =
            *record;
        let mut bytes: Vec<u8> = [start_ns, latency_ns, ret, skb].into_iter().flat_map(u64::to_ne_bytes).collect();
        bytes.extend(
            [span, pid, tid, cpu_start, cpu_end, len, suspect, reserved].into_iter().flat_map(u32::to_ne_bytes),
        );
        bytes.extend(comm);
        bytes
    }

    /// Every field arrives where it belongs.
    #[test]
    fn decodes_every_field() {
        let event = LatencyEvent {
            span: "ip_rcv".into(),
            start: MonotonicTime::from_nanos(1_000),
            latency: Duration::from_secs(5_000),
            pid: 10,
            tid: 11,
            comm: Comm::from_bytes(record().comm),
            cpu_start: 1,
            cpu_end: 2,
            ret: Some(-11),
            skb: Some(Skb::new(0xffff_8880_0000_1000, 84)),
        };
        assert_eq!(decode(&bytes(&record()), &spans()), Ok(Decoded { span: 0, suspect: true, event }));
    }

    /// A void function returns nothing, whatever the register holds; a NULL packet is none.
    #[test]
    fn leaves_out_what_is_not_there() {
        let record = Record { span: 1, skb: 0, suspect: 0, ..record() };
        let Decoded { span, suspect, event } = decode(&bytes(&record), &spans()).unwrap();
        assert_eq!((span, suspect, event.ret, event.skb), (1, false, None, None));
    }

    /// No latency is wrapped, cut to 32 bits or rounded; what can't be one is refused.
    #[test]
    fn latencies_are_64_bit() {
        let exact = [0, 1, 999, 4_294_967_295_000, 4_294_967_296_000, (1 << 32) * 1_000_000, i64::MAX as u64];
        for latency_ns in exact {
            let decoded = decode(&bytes(&Record { latency_ns, ..record() }), &spans()).unwrap();
            assert_eq!(decoded.event.latency.as_nanos(), u128::from(latency_ns));
        }
        for latency_ns in [1 << 63, 5_u64.wrapping_sub(6), u64::MAX] {
            let result = decode(&bytes(&Record { latency_ns, ..record() }), &spans());
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
            assert_eq!(decode(&whole[..len], &spans()), Err(Undecodable::Size(len)));
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(decode(&longer, &spans()), Err(Undecodable::Size(81)));
        for shift in 0..8 {
            let mut shifted = vec![0; shift];
            shifted.extend(&whole);
            assert_eq!(decode(&shifted[shift..], &spans()), decode(&whole, &spans()));
        }
    }

    /// A million byte strings of every kind: an event or an error, never a panic.
    #[test]
    fn takes_any_bytes() {
        let spans = spans();
        // xorshift64*, so that a failure can be repeated.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            state.wrapping_mul(0x2545_f491_4f6c_dd1d)
        };
        let mut bytes = [0; 88];
        let mut decoded = 0;
        for n in 0..1_000_000 {
            for chunk in bytes.chunks_mut(8) {
                chunk.copy_from_slice(&next().to_ne_bytes());
            }
            // Half of them are records in all but their contents.
            let len = if n % 2 == 0 { 80 } else { next() as usize % 89 };
            if n % 4 == 0 {
                bytes[32..36].copy_from_slice(&((next() % 3) as u32).to_ne_bytes());
                bytes[8..16].copy_from_slice(&(next() >> 1).to_ne_bytes());
            }
            if let Ok(Decoded { span, event, .. }) = decode(&bytes[..len], &spans) {
                assert_eq!(event.span, spans[span].name);
                assert!(!event.to_string().is_empty());
                decoded += 1;
            }
        }
        assert!(decoded > 100_000, "only {decoded} were records");
    }
}
