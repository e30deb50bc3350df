//! Bytes of a record → [`EventView`], or why they are none. Pure: no kernel, no clock, any input.

use std::collections::BTreeMap;
use std::sync::Arc;

use plain::Plain;

use crate::event::{DropReason, EventKey};
use crate::flow::Flow;
use crate::kernel::{Return, Symbolizer};
use crate::name::Name;
use crate::span::Key;
use crate::view::EventView;
use crate::wire::{
    FULL, FullRecord, IDENTIFIED, IdentifiedRecord, KeyedRecord, LONG, RawFlow, RawIdentity, RawStory, Record, SHORT,
    outcome,
};

/// What reading a probe's records takes.
#[derive(Debug, Clone, Default)]
pub(crate) struct Codec {
    pub(crate) spans: Vec<SpanCodec>,
    /// The places where they may end, of all spans: records tell by number which it was.
    pub(crate) ends: Vec<EndCodec>,
    /// The running kernel's names of the reasons for which it drops packets.
    pub(crate) drop_reasons: BTreeMap<u32, Name>,
    /// Its functions by address; `None`: no record has one.
    pub(crate) symbols: Option<Arc<Symbolizer>>,
}

/// What to know of a span before its records are read.
#[derive(Debug, Clone)]
pub(crate) struct SpanCodec {
    pub(crate) place: Place,
    pub(crate) key: Key,
    /// Whether its pairs may be in doubt.
    pub(crate) doubted: bool,
}

/// Which span of its probe it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) span: usize,
    /// The number of its first end among those of all spans.
    pub(crate) first_end: usize,
}

/// A place where a span may end, with all that reading such a record takes.
#[derive(Debug, Clone)]
pub(crate) struct EndCodec {
    /// The span's number.
    pub(crate) span: usize,
    pub(crate) span_name: Name,
    pub(crate) key: Key,
    /// Whether the packet's length is read at the start.
    pub(crate) has_len: bool,
    pub(crate) more: More,
    /// Where the function begins that it is at, if that is one, and it was looked up for stories.
    pub(crate) address: Option<u64>,
    pub(crate) name: Name,
    pub(crate) ret: Return,
}

/// What the records of a span have beside what all have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct More {
    identity: bool,
    story: bool,
    /// The bytes of a record that has it.
    pub(crate) needs: usize,
}

impl More {
    pub(crate) const fn new(key: Key, identity: bool, story: bool) -> Self {
        let needs = match key {
            _ if story => FULL,
            _ if identity => IDENTIFIED,
            Key::Call => SHORT,
            _ => LONG,
        };
        Self { identity, story, needs }
    }

    /// Of the bytes of a record, whose length has been checked, the identity.
    pub(crate) fn identity(self, bytes: &[u8]) -> Option<&RawIdentity> {
        let record = self.identity.then(|| IdentifiedRecord::from_bytes(bytes).ok()).flatten();
        record.map(|record| &record.identity)
    }

    /// The same for the story.
    pub(crate) fn story(self, bytes: &[u8]) -> Option<&RawStory> {
        let record = self.story.then(|| FullRecord::from_bytes(bytes).ok()).flatten();
        record.map(|record| &record.story)
    }
}

/// Why some bytes are no record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Undecodable {
    #[error("the record has {0} bytes")]
    Size(usize),
    #[error("the record doesn't begin at a multiple of 8 bytes")]
    Alignment,
    #[error("no span has the end number {0}")]
    End(u32),
    /// The kernel side rules it out; a difference of times that came out negative would look like this.
    #[error("a latency of {0} ns")]
    Latency(u64),
    #[error("outcome number {0}")]
    Outcome(u32),
    #[error("a flow of IP version {0}")]
    Flow(u8),
}

impl Codec {
    /// Checks the record of one finished span, and reads none of it that needn't be.
    ///
    /// Its length is told by its span: calls have short records, whether or not there is room for a long one.
    #[inline(always)]
    pub(crate) fn view<'a>(&'a self, bytes: &'a [u8]) -> Result<EventView<'a>, Undecodable> {
        if bytes.len() != SHORT && ![LONG, IDENTIFIED, FULL].contains(&bytes.len()) {
            return Err(Undecodable::Size(bytes.len()));
        }
        let record = Record::from_bytes(bytes).map_err(|_| Undecodable::Alignment)?;
        let end = self.ends.get(record.end as usize).ok_or(Undecodable::End(record.end))?;
        if record.latency_ns > i64::MAX as u64 {
            return Err(Undecodable::Latency(record.latency_ns));
        }
        // One look tells short records from others.
        let keyed = if end.more.needs == SHORT { None } else { end.keyed(bytes)? };
        if let Some(keyed) = keyed {
            if keyed.outcome > outcome::RELEASED {
                return Err(Undecodable::Outcome(keyed.outcome));
            }
            if matches!(end.key, Key::Flow | Key::FlowReply) && !matches!(keyed.flow.version, 4 | 6) {
                return Err(Undecodable::Flow(keyed.flow.version));
            }
        }
        Ok(EventView::new(self, end, record, keyed, bytes))
    }
}

impl EndCodec {
    /// What a key adds to a record that isn't short.
    #[inline]
    fn keyed<'a>(&self, bytes: &'a [u8]) -> Result<Option<&'a KeyedRecord>, Undecodable> {
        if bytes.len() < self.more.needs {
            return Err(Undecodable::Size(bytes.len()));
        }
        if self.key == Key::Call {
            return Ok(None);
        }
        Ok(Some(KeyedRecord::from_bytes(bytes).map_err(|_| Undecodable::Alignment)?))
    }
}

/// 0 is "not dropped yet", and what is left where a kernel gives no reasons.
pub(crate) fn drop_reason(codec: &Codec, code: u32) -> Option<DropReason> {
    (code != 0).then(|| DropReason { code, name: codec.drop_reasons.get(&code).copied() })
}

/// The function that a dropped packet's record tells of, by the address to which freeing the packet returned there.
#[cold]
pub(crate) fn dropped_by(codec: &Codec, record: &Record) -> Option<Name> {
    let symbols = codec.symbols.as_ref().filter(|_| record.ret != 0)?;
    Some(symbols.resolve_caller(record.ret)?.function())
}

/// `None` for a flow of no known version.
#[inline]
pub(crate) fn event_key(key: Key, keyed: &KeyedRecord) -> Option<EventKey> {
    let raw = keyed.key;
    Some(match key {
        Key::Call => EventKey::Call,
        Key::Skb => EventKey::Skb(raw),
        Key::SkbHead => EventKey::SkbHead(raw),
        Key::Sock => EventKey::Sock(raw),
        Key::Flow | Key::FlowReply => EventKey::Flow(flow_of(&keyed.flow)?),
        // See key_of_thread() in hook.bpf.c.
        Key::Thread if raw >> 32 == 1 => EventKey::Thread(raw as u32),
        Key::Thread => EventKey::Idle(raw as u32),
    })
}

fn flow_of(flow: &RawFlow) -> Option<Flow> {
    let source = (flow.saddr, u16::from_be_bytes(flow.sport));
    let destination = (flow.daddr, u16::from_be_bytes(flow.dport));
    Flow::new(flow.version, flow.protocol, source, destination)
}

/// The value in a 64-bit register, of which a narrower type only defines the low bytes.
#[inline]
pub(crate) fn return_value(register: u64, ty: Return) -> Option<i64> {
    let Return::Number { bytes, signed } = ty else { return None };
    let unused = 64 - 8 * bytes.clamp(1, 8);
    let high = register << unused;
    Some(if signed { (high as i64) >> unused } else { (high >> unused) as i64 })
}

/// For tests: spans of every kind of key, with and without identities and stories.
#[cfg(any(test, fuzzing))]
impl Codec {
    pub(crate) fn canned() -> Self {
        const INT: Return = Return::Number { bytes: 4, signed: true };
        let end = |span, span_name: &str, key, name: &str, ret| EndCodec {
            span,
            span_name: span_name.into(),
            key,
            has_len: true,
            more: More::new(key, false, false),
            address: None,
            name: name.into(),
            ret,
        };
        let and = |end: EndCodec, identity, story| EndCodec { more: More::new(end.key, identity, story), ..end };
        let call = || end(0, "ip_rcv", Key::Call, "ip_rcv", INT);
        Self {
            spans: vec![],
            ends: vec![
                call(),
                end(1, "tcp_v4_send_check", Key::Call, "tcp_v4_send_check", Return::Void),
                end(2, "queued", Key::Skb, "tp:a", Return::Void),
                end(3, "flow", Key::Flow, "b", Return::Void),
                end(4, "thread", Key::Thread, "c", Return::Void),
                end(2, "queued", Key::Skb, "tp:kfree_skb", Return::Void),
                and(call(), true, false),
                and(call(), false, true),
                EndCodec {
                    address: Some(0xdead_beef_ffff_fff5),
                    ..and(end(5, "all", Key::FlowReply, "d:exit", Return::Other), true, true)
                },
                and(end(6, "socket", Key::Sock, "e", Return::Number { bytes: 1, signed: false }), true, false),
                and(end(7, "head", Key::SkbHead, "tp:f", Return::Void), false, true),
            ],
            drop_reasons: BTreeMap::from([(8, "NETFILTER_DROP".into())]),
            symbols: Some(Arc::new(Symbolizer::canned(
                "deadbeefffff0000 T nf_hook_slow.cold\ndeadbeeffffffff5 T ip_rcv\n",
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::event::{Comm, LatencyEvent, MonotonicTime, Outcome, Skb};

    /// Aligned, as all records are.
    #[repr(align(8))]
    struct Aligned([u8; 241]);

    /// What a record tells: its span's index, whether it is suspect, and all the rest.
    fn decode(bytes: &[u8]) -> Result<(usize, bool, LatencyEvent), Undecodable> {
        let mut aligned = Aligned([0; 241]);
        aligned.0[..bytes.len()].copy_from_slice(bytes);
        let codec = Codec::canned();
        let view = codec.view(&aligned.0[..bytes.len()])?;
        assert_eq!(view.end(), view.to_event().end());
        assert_eq!(view.to_string(), view.to_event().to_string());
        Ok((view.index(), view.is_suspect(), view.to_event()))
    }

    fn event(bytes: &[u8]) -> LatencyEvent {
        decode(bytes).unwrap().2
    }

    fn record() -> Record {
        Record {
            start_ns: 1_000,
            latency_ns: 5_000_000_000_000,
            ret: 0xdead_beef_ffff_fff5,
            skb: 0xffff_8880_0000_1000,
            end: 0,
            suspect: 1,
            len: 84,
            cpu_start: 1,
            cpu_end: 2,
            pid: 10,
            tid: 11,
            unused: 0,
            comm: *b"ping\0\0\0\0\0\0\0\0\0\0\0\0",
        }
    }

    /// The record's bytes, as the kernel writes them: the members in order, in the machine's byte order.
    fn bytes(record: &Record) -> Vec<u8> {
        let Record { start_ns, latency_ns, ret, skb, .. } = *record;
        let Record { end, suspect, len, cpu_start, cpu_end, pid, tid, unused, comm, .. } = *record;
        let mut bytes: Vec<u8> = [start_ns, latency_ns, ret, skb].into_iter().flat_map(u64::to_ne_bytes).collect();
        bytes.extend([end, suspect, len, cpu_start, cpu_end, pid, tid, unused].into_iter().flat_map(u32::to_ne_bytes));
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
            identity: None,
            story: None,
        };
        assert_eq!(decode(&bytes(&record())), Ok((0, true, event)));
    }

    /// An identity comes last, behind the place where a call has nothing; a span that should have one has none otherwise.
    #[test]
    fn decodes_identities() {
        let raw = crate::identity::tests::raw();
        let short = bytes(&Record { end: 6, ..record() });
        let mut long = short.clone();
        long.extend([0xaa; size_of::<KeyedRecord>() - size_of::<Record>()]);
        assert_eq!(decode(&short).unwrap_err(), Undecodable::Size(80));
        assert_eq!(decode(&long).unwrap_err(), Undecodable::Size(136));
        let mut words = bytes_of_identity(&raw);
        long.append(&mut words);
        let decoded = event(&long);
        assert_eq!(decoded.identity, Some(crate::identity::Identity::new(&raw)));
        assert_eq!((decoded.outcome, decoded.key), (Outcome::Completed, EventKey::Call));
        // Room for one doesn't mean that there is one.
        long[32..36].copy_from_slice(&0_u32.to_ne_bytes());
        assert_eq!(event(&long).identity, None);
    }

    /// A story comes last, behind the places of a key and an identity, of which a call may have neither; whatever its
    /// bytes are, there is a line for it.
    #[test]
    fn decodes_stories() {
        let mut words = [0xaaaa_aaaa_aaaa_aaaa_u64; size_of::<FullRecord>() / 8];
        let short = bytes(&Record { end: 7, suspect: 0, ..record() });
        for (word, bytes) in words.iter_mut().zip(short.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().unwrap());
        }
        const STORY: usize = size_of::<IdentifiedRecord>() / 8;
        let codec = Codec::canned();
        let mut story = |switches: u64, context: u32, len: u32| {
            words[STORY] = switches;
            words[STORY + 1] = u64::from(len) << 32 | u64::from(context);
            words[STORY + 2] = 0xdead_beef_ffff_0010;
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let mut aligned = Box::new(Longest([0; size_of::<FullRecord>()]));
            aligned.0.copy_from_slice(&bytes);
            let view = codec.view(&aligned.0).unwrap();
            assert_eq!((view.identity(), view.key()), (None, EventKey::Call));
            assert!(!view.to_string().is_empty());
            for len in (0..size_of::<FullRecord>()).step_by(8) {
                assert_eq!(codec.view(&aligned.0[..len]).err(), Some(Undecodable::Size(len)));
            }
            view.to_event().story.unwrap()
        };
        let told = story(2, 1, 8);
        assert_eq!(told.to_string(), "task, switched out 2 times");
        assert_eq!(told.stack.to_string(), "nf_hook_slow.cold+0x10");
        for (switches, context, len) in [(0, 0, 0), (u64::MAX, u32::MAX, u32::MAX), (1 << 63, 6, 7), (3, 5, 1 << 31)] {
            assert_eq!(story(switches, context, len).stack.frames(), [], "{len}");
        }
        assert!(story(0, 2, 512).stack.is_cut());
    }

    #[repr(align(8))]
    struct Longest([u8; size_of::<FullRecord>()]);

    /// As the kernel writes it: the members in order, in the machine's byte order.
    fn bytes_of_identity(raw: &crate::wire::RawIdentity) -> Vec<u8> {
        let flow = raw.flow;
        let mut bytes = [flow.saddr, flow.daddr].concat();
        bytes.extend(flow.sport.into_iter().chain(flow.dport).chain([flow.version, flow.protocol]).chain(flow.unused));
        bytes.extend([raw.cgroup, raw.cookie].into_iter().flat_map(u64::to_ne_bytes));
        let words = [raw.known, raw.len, raw.seq, raw.mark, raw.hash, raw.netns, raw.interface, raw.received_on];
        bytes.extend(words.into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend([raw.vlan, raw.queue].into_iter().flat_map(u16::to_ne_bytes));
        bytes.extend([raw.tos, raw.ttl, raw.tcp_flags, raw.direction]);
        bytes
    }

    fn keyed(end: u32, key: u64, outcome: u32, reason: u32, flow: &[u8; 40]) -> Vec<u8> {
        let mut bytes = bytes(&Record { end, suspect: 0, ..record() });
        bytes.extend(key.to_ne_bytes());
        bytes.extend([outcome, reason].into_iter().flat_map(u32::to_ne_bytes));
        bytes.extend(flow);
        bytes
    }

    /// What a key adds arrives: which key, how it ended, why a packet was dropped.
    #[test]
    fn decodes_keys() {
        let none = [0; 40];
        let queued = event(&keyed(2, 0xabc, outcome::REACHED, 8, &none));
        assert_eq!((queued.key, queued.outcome), (EventKey::Skb(0xabc), Outcome::Completed));
        let reason = |code| match event(&keyed(2, 0xabc, outcome::DROPPED, code, &none)).outcome {
            Outcome::Dropped { reason, .. } => {
                reason.map(|reason| (reason.code, reason.name.map(|name| name.to_string())))
            }
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
        assert_eq!(decode(&keyed(11, 1, 0, 0, &none)), Err(Undecodable::End(11)));
        let dropped = event(&keyed(5, 1, outcome::DROPPED, 8, &none));
        assert_eq!((dropped.span, dropped.ended_at), ("queued".into(), "tp:kfree_skb".into()));
        // It is no value that anything returned.
        assert!(dropped.outcome.to_string() == "dropped (NETFILTER_DROP) in nf_hook_slow" && dropped.ret.is_none());
    }

    /// Addresses of both versions, and ports in network byte order.
    #[test]
    fn decodes_flows() {
        let mut raw = [0; 40];
        raw[..4].copy_from_slice(&[10, 0, 0, 1]);
        raw[16..20].copy_from_slice(&[10, 0, 0, 2]);
        raw[32..36].copy_from_slice(&[0x01, 0xbb, 0x9c, 0x40]);
        (raw[36], raw[37]) = (4, 6);
        let text = |raw: &[u8; 40]| event(&keyed(3, 3, 0, 0, raw)).key.to_string();
        assert_eq!(text(&raw), "tcp 10.0.0.1:443 > 10.0.0.2:40000");
        raw[36] = 6;
        assert_eq!(text(&raw), "tcp [a00:1::]:443 > [a00:2::]:40000");
        raw[36] = 5;
        assert_eq!(decode(&keyed(3, 3, 0, 0, &raw)), Err(Undecodable::Flow(5)));
    }

    /// A void function returns nothing, whatever the register holds; a NULL packet is none.
    #[test]
    fn leaves_out_what_is_not_there() {
        let record = Record { end: 1, skb: 0, suspect: 0, ..record() };
        let (span, suspect, event) = decode(&bytes(&record)).unwrap();
        assert_eq!((span, suspect, event.ret, event.skb), (1, false, None, None));
    }

    /// No latency is wrapped, cut to 32 bits or rounded; what can't be one is refused.
    #[test]
    fn latencies_are_64_bit() {
        let exact = [
            0,
            1,
            999,
            4_294_967_295_000,
            4_294_967_296_000,
            5_000_000_000_000,
            (1 << 32) * 1_000_000,
            i64::MAX as u64,
        ];
        for latency_ns in exact {
            let event = event(&bytes(&Record { latency_ns, ..record() }));
            assert_eq!(event.latency.as_nanos(), u128::from(latency_ns));
        }
        for latency_ns in [1 << 63, 999_u64.wrapping_sub(1_000), 5_u64.wrapping_sub(1 << 40)] {
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

    /// Shorter and longer records are refused, and such as no ring has.
    #[test]
    fn sizes_and_alignment() {
        let whole = bytes(&record());
        for len in 0..whole.len() {
            assert_eq!(decode(&whole[..len]), Err(Undecodable::Size(len)));
        }
        let mut longer = whole.clone();
        longer.push(0);
        assert_eq!(decode(&longer), Err(Undecodable::Size(81)));
        let mut aligned = Aligned([0; 241]);
        for shift in 1..8 {
            aligned.0[shift..shift + 80].copy_from_slice(&whole);
            assert_eq!(Codec::canned().view(&aligned.0[shift..shift + 80]).err(), Some(Undecodable::Alignment));
        }
    }

    /// A call's record is short also where there is room for a long one, and another's never is.
    #[test]
    fn length_by_span() {
        let mut long = bytes(&record());
        long.resize(136, 0xff);
        assert_eq!(decode(&long), decode(&bytes(&record())));
        let queued = keyed(2, 0xabc, 0, 0, &[0; 40]);
        assert_eq!(decode(&queued[..80]), Err(Undecodable::Size(80)));
    }
}
