//! Each kind of packets is what it says, and is seen as often as it says.

use dwell::{Events, Hook, Key, LatencyProbe, Span};

use crate::lab::{DEVICE, Side};
use crate::packets::seen::{EARLY, FLOWS, HOOKS, seen};
use crate::packets::{Hosts, Kind, Place, kinds};
use crate::raw::{Frame, Wire, mark_paged};
use crate::support::{eventually, finish};

/// How many of each kind are sent.
const UNITS: usize = 3;

/// The first bytes of a frame, and what is beside them, for a person to read.
fn picture(frame: &Frame) -> String {
    let bytes: String = frame.bytes.iter().take(80).map(|byte| format!("{byte:02x}")).collect();
    format!("\n  {} bytes, tag {:x?}: {bytes}", frame.bytes.len(), frame.tag)
}

/// What is wrong with the frames that were seen at a place, if anything is.
fn complaint(kind: &Kind, place: Place, frames: &[Frame]) -> Option<String> {
    let expected = || kind.frames.iter().filter(|(at, ..)| *at == place);
    let all: usize = expected().map(|(_, count, _)| UNITS * count).sum();
    let fits = expected().all(|(_, count, is)| frames.iter().filter(|frame| is(frame)).count() == UNITS * count);
    let pictures: String = frames.iter().map(picture).collect();
    (!fits || frames.len() != all)
        .then(|| format!("{} by {}, {place:?}, not {all} as wanted:{pictures}", kind.name, kind.by))
}

/// The frames of each kind are of the form wanted, as many as wanted, and no others go that way.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn packets_have_their_form() {
    let hosts = Hosts::new();
    let tap = |side: Side, device: &str| hosts.lab.on(side, || Wire::tap(device));
    let (left, right, loopback) = (tap(Side::Left, DEVICE), tap(Side::Right, DEVICE), tap(Side::Left, "lo"));
    // In the order of `Place::ALL`.
    let seen = || [left.seen().0, right.seen().1, loopback.seen().1];
    hosts.lab.right(|| mark_paged(DEVICE));
    hosts.lab.count_marked(Side::Right);
    let mut complaints = Vec::new();
    for kind in kinds() {
        let mut send = (kind.prepare)(&hosts);
        let (_, marked) = (seen(), hosts.lab.marked(Side::Right));
        (0..UNITS).for_each(|_| send());
        let marked = hosts.lab.marked(Side::Right) - marked;
        let places = Place::ALL.into_iter().zip(seen());
        complaints.extend(places.filter_map(|(place, frames)| complaint(&kind, place, &frames)));
        if marked != (UNITS * kind.paged) as u64 {
            complaints.push(format!("{}: {marked} are paged", kind.name));
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// A span from a hook to where nothing here ever comes, which counts what passes the hook.
fn passing(hook: Hook, name: &str) -> Span {
    Span::between(hook, Hook::entry("tcp_v4_send_reset")).named(name)
}

/// Sends units of a kind, and returns how many starts spans have counted meanwhile. Those of functions have names without
/// a colon.
fn started<const N: usize>(probe: &LatencyProbe, spans: [&str; N], send: &mut dyn FnMut()) -> [usize; N] {
    let counts = || {
        // Softirqs may still be on their way out when what they brought has been read.
        eventually("all calls have returned", || {
            probe.ledger().spans.iter().all(|account| account.open == 0 || account.span.contains(':'))
        });
        let ledger = probe.ledger();
        spans.map(|span| ledger.get(span).expect("it is measured").started as usize)
    };
    let before = counts();
    (0..UNITS).for_each(|_| send());
    let after = counts();
    std::array::from_fn(|n| after[n] - before[n])
}

/// Hooks see packets of each kind as often as is said.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn packets_are_seen_so_often() {
    let hosts = Hosts::new();
    let builder = HOOKS.iter().fold(LatencyProbe::builder(), |builder, hook| {
        builder.span(match hook.strip_prefix("tp:") {
            None => Span::function(*hook),
            Some(tracepoint) => passing(Hook::tracepoint(tracepoint), hook),
        })
    });
    let probe = builder.events(Events::None).attach().unwrap_or_else(|error| panic!("{error}"));
    let mut complaints = Vec::new();
    for kind in kinds() {
        let mut send = (kind.prepare)(&hosts);
        let counts = started(&probe, HOOKS, &mut *send);
        let expected = seen(kind.name);
        for ((hook, count), expected) in HOOKS.iter().zip(counts).zip(expected) {
            if count != UNITS * expected {
                complaints.push(format!("{} by {}: {hook} sees {count} of {}", kind.name, kind.by, UNITS * expected));
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    let (_, ledger) = finish(probe);
    assert!(ledger.spans.iter().all(|account| account.missed == 0), "{ledger}");
}

/// Where headers aren't there yet, no flow is found, and only there.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn packets_have_no_flow_early() {
    let hosts = Hosts::new();
    let names = EARLY.map(|(function, _)| format!("flow:{function}"));
    let builder = EARLY.iter().zip(&names).fold(LatencyProbe::builder(), |builder, (&(function, argument), name)| {
        builder.span(passing(Hook::entry(function).argument(argument), name).keyed_by(Key::Flow))
    });
    let probe = builder.events(Events::None).attach().unwrap_or_else(|error| panic!("{error}"));
    for kind in kinds() {
        let Some((_, flows)) = FLOWS.iter().find(|(name, _)| *name == kind.name) else { continue };
        let mut send = (kind.prepare)(&hosts);
        let counts = started(&probe, names.each_ref().map(String::as_str), &mut *send);
        assert_eq!(counts, flows.map(|count| UNITS * count), "{} by {}: {names:?}", kind.name, kind.by);
    }
}
