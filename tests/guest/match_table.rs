//! What filters make of each kind of packet: the table in the documentation of `Filter`, row by row.

use dwell::{Events, Filter, LatencyProbe};

use crate::packets::seen::{HOOKS, seen};
use crate::packets::{Hosts, kinds};
use crate::support::eventually;

/// How many of each kind are sent.
const UNITS: usize = 2;
/// Where packets are looked at: where they are sent, before and after they have headers, and where they come in. What a
/// tunnel brought comes in at `ip_rcv_core` a second time.
const FUNCTIONS: [&str; 6] =
    ["udp_sendmsg", "__tcp_transmit_skb", "dev_hard_start_xmit", "ip_rcv", "ip_rcv_core", "ipv6_rcv"];

/// What `udp dst port 5000` makes of a kind of packets at a function that sees so many of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Made {
    wanted: usize,
    unparsed: usize,
}

fn expected(kind: &str, function: &str, inner: bool) -> Made {
    let hook = HOOKS.iter().position(|hook| *hook == function).expect("it is one of them");
    let seen = seen(kind)[hook];
    let wanted = |wanted| Made { wanted, unparsed: 0 };
    match kind {
        // Another protocol, whatever its ports; of TCP's own packets their sockets know it before their headers do.
        _ if kind.starts_with("tcp") || kind.starts_with("connect") || kind.starts_with("icmp") => wanted(0),
        // Sent to another port. Their later fragments begin like a header to port 5000, and have no ports.
        "fragments4-other" | "fragments6-other" => wanted(0),
        "fragments4" | "fragments6" => wanted(seen.min(1)),
        // A tunnel's own packets go to another port, or have none: what is within counts only where that is asked for.
        "vxlan" | "ipip" if !inner => match function {
            "udp_sendmsg" | "dev_hard_start_xmit" | "ip_rcv_core" => wanted(1),
            _ => wanted(0),
        },
        // A socket that isn't connected knows only its own port.
        "udp4-unconnected" | "udp4-mapped" if function == "udp_sendmsg" => Made { wanted: 0, unparsed: seen },
        _ => wanted(seen),
    }
}

fn check(inner: bool) {
    let hosts = Hosts::new();
    let filter: Filter = "udp dst port 5000".parse().unwrap();
    let builder = FUNCTIONS.iter().fold(LatencyProbe::builder(), |builder, function| builder.function(*function));
    let builder = builder.events(Events::None).filter(filter);
    let builder = if inner { builder.inner_headers() } else { builder };
    let probe = builder.attach().unwrap_or_else(|error| panic!("{error}"));
    let counts = || {
        // Softirqs may still be on their way out when what they brought has been read.
        eventually("all calls have returned", || probe.ledger().spans.iter().all(|account| account.open == 0));
        let ledger = probe.ledger();
        FUNCTIONS.map(|function| {
            let account = ledger.get(function).expect("it is measured");
            Made { wanted: account.started as usize, unparsed: account.unparsed as usize }
        })
    };
    let mut complaints = Vec::new();
    for kind in kinds() {
        let mut send = (kind.prepare)(&hosts);
        let before = counts();
        (0..UNITS).for_each(|_| send());
        for ((function, before), after) in FUNCTIONS.into_iter().zip(before).zip(counts()) {
            let made = Made { wanted: after.wanted - before.wanted, unparsed: after.unparsed - before.unparsed };
            let Made { wanted, unparsed } = expected(kind.name, function, inner);
            let expected = Made { wanted: UNITS * wanted, unparsed: UNITS * unparsed };
            if made != expected {
                complaints.push(format!("{} by {} at {function}: {made:?}, not {expected:?}", kind.name, kind.by));
            }
        }
    }
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

/// By the outermost headers, as it is by default.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_outer_headers() {
    check(false);
}

/// By those of the packet within.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_inner_headers() {
    check(true);
}
