//! The laboratory does what tests in it rely on.

use std::panic::catch_unwind;
use std::thread;
use std::time::{Duration, Instant};

use crate::lab::{DEVICE, Ip, Lab, Side, burst, loopback_tcp, loopback_udp, packets, send_datagrams, tcp_messages};
use crate::support::{ms, run, would_block};

/// How long each of some calls takes; the median.
fn median(count: usize, mut call: impl FnMut()) -> Duration {
    let mut times: Vec<_> = (0..count)
        .map(|_| {
            let before = Instant::now();
            call();
            before.elapsed()
        })
        .collect();
    times.sort();
    times[count / 2]
}

/// Each datagram is one packet, and nothing else is on the wire, for as long as it may take to come.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn only_the_tests_own_datagrams_are_on_the_wire() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    send_datagrams(&left, &right, 200, &[4; 32]);
    assert_eq!((lab.packets(Side::Left), lab.packets(Side::Right)), ((0, 200), (200, 0)));
    let (left, right) = lab.udp_pair(Ip::V6);
    send_datagrams(&left, &right, 100, &[6; 32]);
    burst(&right, &left, 80, &[6; 1_452]);
    thread::sleep(ms(2_000));
    assert_eq!((lab.packets(Side::Left), lab.packets(Side::Right)), ((80, 300), (300, 80)));
}

/// Messages come and go, over both protocols.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn messages_cross_by_tcp() {
    const COUNT: u64 = 100;
    let lab = Lab::new();
    for ip in Ip::BOTH {
        let before = lab.packets(Side::Right);
        let (client, server) = lab.tcp_pair(ip);
        assert_eq!(client.peer_addr().unwrap().ip(), Side::Right.address(ip));
        assert_eq!(server.peer_addr().unwrap().ip(), Side::Left.address(ip));
        tcp_messages(&client, &server, COUNT as usize, &[1; 500]);
        let after = lab.packets(Side::Right);
        // Acknowledgements mostly ride on the answers.
        assert!((after.0 - before.0) >= COUNT && (after.1 - before.1) >= COUNT, "{before:?}..{after:?}");
    }
}

/// Loopback, of the guest itself and of a host in the laboratory.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn loopback_of_either() {
    fn traffic() -> u64 {
        let before = packets("lo");
        for ip in Ip::BOTH {
            let (a, b) = loopback_udp(ip);
            send_datagrams(&a, &b, 50, b"there");
            send_datagrams(&b, &a, 50, b"back");
            let (client, server) = loopback_tcp(ip);
            tcp_messages(&client, &server, 50, b"hello");
        }
        packets("lo").0 - before.0
    }
    let lab = Lab::new();
    for count in [traffic(), lab.left(traffic)] {
        assert!(count >= 2 * (100 + 100), "{count}");
    }
    assert_eq!(lab.packets(Side::Left), (0, 0), "it stays within");
    assert_eq!(lab.right(|| packets("lo")), (0, 0), "hosts have their own");
}

/// A host in the middle forwards all, once.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn the_middle_forwards() {
    let lab = Lab::forwarding();
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        send_datagrams(&left, &right, 30, b"there");
        send_datagrams(&right, &left, 20, b"back");
    }
    thread::sleep(ms(1_000));
    assert_eq!((lab.packets(Side::Left), lab.packets(Side::Right)), ((40, 60), (60, 40)));
    assert_eq!(lab.middle(|| (packets("left"), packets("right"))), ((60, 40), (40, 60)));
    let (client, server) = lab.tcp_pair(Ip::V6);
    tcp_messages(&client, &server, 10, b"hello");
}

/// A delay of what one end sends is in each round trip, once.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn netem_delays() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    let round_trip = || {
        send_datagrams(&left, &right, 1, b"there");
        send_datagrams(&right, &left, 1, b"back");
    };
    let without = median(11, round_trip);
    lab.netem_delay(Side::Left, ms(20));
    let with = median(11, round_trip);
    lab.unimpaired(Side::Left);
    let again = median(11, round_trip);
    println!("{without:?}, delayed {with:?}, then {again:?}");
    assert!(with >= ms(20) && with < ms(120), "{with:?}");
    assert!(without < ms(20) && again < ms(20), "{without:?}, {again:?}");
}

/// A limit of what one end sends has packets wait for each other.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn tbf_limits() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V6);
    lab.tbf(Side::Left, 1_000);
    let before = Instant::now();
    burst(&left, &right, 50, &[0; 1_000]);
    let took = before.elapsed();
    // 50 packets of 1062 bytes, less the 2000 that may go at once.
    assert!(took >= ms(400) && took < ms(2_000), "{took:?}");
}

/// Exactly what goes to the port is dropped.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn the_rule_drops() {
    let lab = Lab::new();
    for (n, ip) in (1..).zip(Ip::BOTH) {
        let (left, right) = lab.udp_pair(ip);
        let (sender, deaf) = lab.udp_pair(ip);
        lab.drop_rule(Side::Right, deaf.local_addr().unwrap().port());
        for _ in 0..50 {
            sender.send(b"lost").unwrap();
            send_datagrams(&left, &right, 1, b"there");
        }
        assert_eq!(lab.dropped(Side::Right), 50);
        deaf.set_read_timeout(Some(ms(50))).unwrap();
        assert!(would_block(&deaf.recv(&mut [0; 8]).unwrap_err()));
        send_datagrams(&deaf, &sender, 1, b"it may send");
        assert_eq!(lab.packets(Side::Right), (n * 100, n), "dropped on arrival");
        lab.right(|| run("nft delete table inet dropping"));
    }
}

/// Thousands of rules take their time.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn the_firewall_is_slow() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    let there = || send_datagrams(&left, &right, 1, b"there");
    let back = || send_datagrams(&right, &left, 1, b"back");
    let without = median(101, there);
    lab.slow_firewall(Side::Right, 5_000);
    let (with, unaffected) = (median(101, there), median(101, back));
    println!("{without:?}, with rules {with:?}, the other way {unaffected:?}");
    assert!(with > 2 * without && with > 2 * unaffected, "{without:?} {with:?} {unaffected:?}");
}

/// All packets pass the classifiers, and arrive.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn classifiers_let_pass() {
    let lab = Lab::new();
    lab.ingress_filter(Side::Right);
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        send_datagrams(&left, &right, 30, b"there");
        send_datagrams(&right, &left, 20, b"back");
    }
    assert_eq!(lab.filtered(Side::Right), (60, 40));
}

/// A connection is established from its first answer on.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn connections_are_tracked() {
    let lab = Lab::new();
    lab.conntrack(Side::Right);
    for (n, ip) in (1..).zip(Ip::BOTH) {
        let (left, right) = lab.udp_pair(ip);
        send_datagrams(&left, &right, 5, b"new");
        send_datagrams(&right, &left, 1, b"answer");
        send_datagrams(&left, &right, 40, b"established");
        assert_eq!(lab.established(Side::Right), n * 40);
    }
}

/// Nothing remains, also when a test fails in between, and when a socket is still open.
#[test]
#[ignore = "runs as root in a guest: scripts/test does that"]
fn the_laboratory_goes() {
    let everything = || run("ip netns list; ip -br link");
    let before = everything();
    let lab = Lab::new();
    let (left, _right) = lab.udp_pair(Ip::V4);
    let inside = lab.left(|| run("ip -br link"));
    assert!(inside.contains(DEVICE), "{inside}");
    drop(lab);
    assert!(left.send(b"nowhere").is_err());
    assert!(catch_unwind(|| Lab::forwarding().left(|| panic!("a test fails"))).is_err());
    assert_eq!(everything(), before);
}
