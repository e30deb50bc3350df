//! What fuzzing runs, and the tests with random bytes and with the corpus in `tests/corpus`. Bytes that others wrote are
//! read as the crate reads them, and all is asked of what comes out. No part of the API.
//!
//! Each takes any bytes, and panics if something is wrong.

use std::sync::OnceLock;

use crate::decode::Codec;
use crate::driver::kept_records;
use crate::error::ErrorKind;
use crate::event::LatencyEvent;
use crate::events::LONGEST;
use crate::filter::Filter;
pub use crate::filter::fuzz_instructions as instructions;
use crate::identity::Identity;
pub use crate::kernel::fuzz::{btf, kallsyms};
use crate::view::EventView;

/// All of the bytes but the first are a record; the first says how far from where one should begin. Whether it is one.
pub fn record(data: &[u8]) -> bool {
    let Some((&shift, record)) = data.split_first() else { return false };
    let shift = usize::from(shift % 8);
    // Its memory ends where it does, so that AddressSanitizer sees what reads beyond it.
    let mut memory = Vec::with_capacity(shift + record.len());
    memory.resize(shift, 0);
    memory.extend_from_slice(record);
    match codec().view(&memory[shift..]) {
        Ok(view) => {
            ask(&view);
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// What one CPU keeps of the slowest spans.
pub fn slowest(data: &[u8]) -> bool {
    let Some((&size, element)) = data.split_first() else { return false };
    let events = kept_records(codec(), size, element);
    events.iter().for_each(check);
    !events.is_empty()
}

/// A filter's text. Whether it is one.
pub fn filter(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    match text.parse::<Filter>() {
        Ok(filter) => {
            let shown = filter.to_string();
            assert!(!shown.chars().any(char::is_control), "{shown:?}");
            assert!(filter.complaint().is_none(), "{shown}");
            // What is shown may be longer than what is read.
            match shown.parse::<Filter>() {
                Ok(again) => assert_eq!((&again, again.to_string()), (&filter, shown)),
                Err(error) => assert!(shown.len() > text.len(), "{shown}: {error}"),
            }
            true
        }
        Err(error) => {
            let position = if let ErrorKind::FilterSyntax { position, .. } = error.kind() { *position } else { 0 };
            assert!((1..=text.chars().count() + 1).contains(&position), "{position} {text:?}: {error}");
            let shown = error.to_string();
            assert!(!shown.chars().any(char::is_control), "{shown:?}");
            false
        }
    }
}

fn codec() -> &'static Codec {
    static CODEC: OnceLock<Codec> = OnceLock::new();
    CODEC.get_or_init(Codec::canned)
}

/// Each of its methods, and the copy that tells the same.
fn ask(view: &EventView<'_>) {
    let event = view.to_event();
    assert_eq!((view.span(), view.ended_at()), (event.span, event.ended_at));
    assert_eq!((view.outcome(), view.key()), (event.outcome, event.key));
    assert_eq!((view.start(), view.latency(), view.end()), (event.start, event.latency, event.end()));
    assert_eq!((view.pid(), view.tid(), view.comm()), (event.pid, event.tid, event.comm));
    assert_eq!((view.cpu_start(), view.cpu_end()), (event.cpu_start, event.cpu_end));
    assert_eq!((view.ret(), view.skb(), view.identity()), (event.ret, event.skb, event.identity));
    assert_eq!(view.story().as_ref(), event.story.as_deref());
    assert!(codec().ends.iter().any(|end| (end.span, end.span_name) == (view.index(), event.span)));
    let _ = view.is_suspect();
    check(&event);
}

/// What has to hold whatever the bytes were.
fn check(event: &LatencyEvent) {
    assert!(event.latency <= LONGEST && event.end() >= event.start, "{event}");
    assert!(event.comm.as_bytes().len() <= 16 && !event.outcome.as_str().is_empty());
    let _ = (event.start.to_system_time(), event.key.to_string());
    let line = event.to_string();
    assert!(line.starts_with(event.span.as_str()) && !line.chars().any(char::is_control), "{line:?}");
    if let Some(identity) = &event.identity {
        check_identity(identity);
    }
    if let Some(story) = &event.story {
        // As many as the kernel keeps, and the function itself, which may not be on the stack.
        assert!(story.stack.frames().len() <= 65 && !story.to_string().is_empty());
        let lines = story.stack.to_string().lines().count();
        assert_eq!(lines, story.stack.frames().len() + usize::from(story.stack.is_cut()));
    }
}

fn check_identity(identity: &Identity) {
    assert!(identity.dscp().is_none_or(|dscp| dscp < 64));
    let version = identity.source().map(|source| if source.is_ipv4() { 4 } else { 6 });
    assert!(version.is_none() || version == identity.ip_version());
    assert_eq!(version.is_some(), identity.destination().is_some());
    let ports = [identity.source_port(), identity.destination_port()];
    assert!([identity.local_port(), identity.remote_port()].iter().all(|port| port.is_none() || ports.contains(port)));
    assert_eq!(identity.is_empty(), identity.len() == Some(0));
    let _ = (identity.protocol(), identity.ttl(), identity.vlan(), identity.tcp_flags(), identity.tcp_sequence());
    let _ = (identity.interface(), identity.received_on(), identity.netns(), identity.mark(), identity.hash());
    let _ = (identity.queue(), identity.cgroup(), identity.socket_cookie());
    assert!(!identity.to_string().is_empty() && !format!("{identity:?}").is_empty());
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::wire::{FULL, IDENTIFIED, LONG, SHORT};

    type Target = fn(&[u8]) -> bool;

    /// By the name of their directory in the corpus.
    const TARGETS: [(&str, Target); 6] = [
        ("record", record),
        ("slowest", slowest),
        ("btf", btf),
        ("kallsyms", kallsyms),
        ("filter", filter),
        ("instructions", instructions),
    ];

    /// xorshift64*, so that a failure can be repeated.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
        }

        fn below(&mut self, end: usize) -> usize {
            (self.next() % end as u64) as usize
        }

        fn fill(&mut self, bytes: &mut [u8]) {
            for chunk in bytes.chunks_mut(8) {
                let word = self.next().to_ne_bytes();
                chunk.copy_from_slice(&word[..chunk.len()]);
            }
        }
    }

    /// A number's place in a record, behind the byte that says where it begins.
    fn put(data: &mut [u8], offset: usize, value: u32) {
        if let Some(place) = data.get_mut(1 + offset..1 + offset + 4) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
    }

    /// Makes random bytes a record, as far as its length goes: of an end that there is, with an outcome, a version of IP
    /// and a length of its stack.
    fn be_valid(data: &mut [u8], random: &mut Random) {
        data[0] = 0;
        put(data, 12, (random.next() >> 33) as u32);
        put(data, 32, random.below(codec().ends.len()) as u32);
        put(data, 88, random.below(4) as u32);
        if let Some(version) = data.get_mut(1 + 132) {
            *version = if random.below(2) == 0 { 4 } else { 6 };
        }
        put(data, IDENTIFIED + 8, random.below(7) as u32);
        put(data, IDENTIFIED + 12, 8 * random.below(66) as u32);
    }

    /// A million byte strings: random ones, and records that are whole, cut, longer, bent or in the wrong place. Each is an
    /// event or an error.
    #[test]
    fn million_records() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut data = [0; 1 + FULL + 16];
        let (mut good, mut refused) = (0, 0);
        for n in 0..1_000_000 {
            // Mostly short ones, as mostly there are.
            let size = [SHORT, LONG, SHORT, IDENTIFIED, SHORT, LONG, SHORT, FULL][n % 8];
            let data = &mut data[..1 + size + 16];
            random.fill(data);
            let mut len = size;
            if n % 16 < 8 {
                be_valid(data, &mut random);
                match random.below(6) {
                    0 => len = random.below(size + 17),
                    1 => data[0] = 1 + random.below(7) as u8,
                    2 => data[1 + random.below(size)] ^= 1 << random.below(8),
                    _ => {}
                }
            } else if n % 16 < 12 {
                len = random.below(size + 17);
            }
            if record(&data[..1 + len]) { good += 1 } else { refused += 1 }
        }
        assert!(good > 100_000 && refused > 400_000, "{good} were records, {refused} none");
    }

    /// What the kernel keeps, with any bytes in it.
    #[test]
    fn kept_records_of_any_bytes() {
        let mut random = Random(7);
        let mut found = 0;
        for n in 0..20_000 {
            let mut data = vec![0; random.below(3_000)];
            random.fill(&mut data);
            // Places whose rank is that of their latency.
            let stride = 8 + [SHORT, LONG, IDENTIFIED, FULL][usize::from(data.first().copied().unwrap_or(0) % 4)];
            if n % 2 == 0 {
                for place in data.get_mut(1 + 64..).unwrap_or_default().chunks_exact_mut(stride) {
                    let mut whole = [0; 1 + FULL];
                    whole[1..stride - 7].copy_from_slice(&place[8..]);
                    be_valid(&mut whole[..stride - 7], &mut random);
                    place[8..].copy_from_slice(&whole[1..stride - 7]);
                    let latency = u64::from_ne_bytes(place[16..24].try_into().unwrap());
                    place[..8].copy_from_slice(&(latency + 1).to_ne_bytes());
                }
            }
            found += usize::from(slowest(&data));
        }
        assert!(found > 1_000, "{found}");
    }

    /// Random texts of lines and words, and what has been bent of good ones.
    #[test]
    fn bent_texts_and_types() {
        let mut random = Random(11);
        for (name, target) in TARGETS {
            for seed in corpus(name) {
                for _ in 0..400 {
                    let mut data = seed.clone();
                    for _ in 0..1 + random.below(4) {
                        let at = random.below(data.len().max(1));
                        match random.below(5) {
                            0 => data.truncate(at),
                            1 => data.insert(at.min(data.len()), random.next() as u8),
                            2 if !data.is_empty() => drop(data.remove(at.min(data.len() - 1))),
                            3 => data.extend_from_within(at.min(data.len())..),
                            _ => {
                                if let Some(byte) = data.get_mut(at) {
                                    *byte ^= 1 << random.below(8);
                                }
                            }
                        }
                    }
                    target(&data);
                }
            }
        }
    }

    /// The files of a target.
    fn corpus(name: &str) -> Vec<Vec<u8>> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
        let files = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files.into_iter().map(|file| fs::read(file).unwrap()).collect()
    }

    /// What fuzzing begins with, and what it has found: of each kind some that are good and some that aren't.
    #[test]
    fn replays_the_corpus() {
        for (name, target) in TARGETS {
            let answers: Vec<_> = corpus(name).iter().map(|data| target(data)).collect();
            assert!(answers.contains(&true) && answers.contains(&false), "{name}: {answers:?}");
        }
    }
}
