//! Spans between any two hooks: by every key, and whatever becomes of what the key stands for.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dwell::{EventKey, Hook, Key, LatencyEvent, LatencyProbe, Outcome, Restart, Span};

use crate::lab::{Ip, Lab, Side, loopback_tcp, loopback_udp, send_datagrams, tcp_messages};
use crate::support::{PATIENCE, SetOnDrop, eventually, finish, kernel_version, ms, only, others_first};

/// Attaches one span.
fn span(span: Span) -> LatencyProbe {
    LatencyProbe::builder().span(span).attach().unwrap_or_else(|error| panic!("{error}"))
}

/// From the sending device's queue to the receiving stack.
fn across() -> Span {
    Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb")).named("across")
}

/// N packets make N events, by each key that a packet has, over a wire and over loopback, UDP and TCP, IPv4 and IPv6.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn every_packet_by_every_key() {
    const PACKETS: usize = 100;
    let lab = Lab::new();
    let keys = [Key::Skb, Key::SkbHead, Key::Flow, Key::Thread];
    let probe = |span: &dyn Fn(Key) -> Span| {
        let builder = keys.iter().fold(LatencyProbe::builder(), |builder, &key| {
            builder.span(span(key).keyed_by(key).named(key.to_string()))
        });
        builder.attach().unwrap_or_else(|error| panic!("{error}"))
    };
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        let (here, there) = loopback_udp(ip);
        let probe = probe(&|_| across());
        send_datagrams(&left, &right, PACKETS, b"over the wire");
        send_datagrams(&here, &there, PACKETS, b"over loopback");
        let (events, ledger) = finish(probe);
        for key in keys {
            let name = key.to_string();
            let of_key = || events.iter().filter(|event| event.span == name.as_str());
            let account = ledger.get(&name).unwrap();
            if key == Key::Thread {
                // The receiving half of a wire may run in another thread than the sending one, such as ksoftirqd.
                assert!(of_key().count() >= PACKETS, "{ip:?} {account}");
                continue;
            }
            assert_eq!(of_key().count(), 2 * PACKETS, "{ip:?} {account}");
            assert!(account.is_lossless() && account.started == 2 * PACKETS as u64, "{ip:?} {account}");
            assert!(
                of_key().all(|event| event.outcome == Outcome::Completed && event.ended_at == "tp:netif_receive_skb")
            );
        }
        // The sender's addresses and ports, as user space writes them.
        let (source, destination) = (left.local_addr().unwrap(), right.local_addr().unwrap());
        let flows = events.iter().filter(|event| match event.key {
            EventKey::Flow(flow) => (flow.protocol, flow.source(), flow.destination()) == (17, source, destination),
            _ => false,
        });
        assert_eq!(flows.count(), PACKETS);
        let by_skb = |event: &&LatencyEvent| matches!(event.key, EventKey::Skb(_));
        for event in events.iter().filter(by_skb) {
            let skb = event.skb.expect("a tracepoint of packets");
            assert_eq!(event.key, EventKey::Skb(skb.address));
            let header = if ip == Ip::V4 { 20 } else { 40 };
            assert_eq!(skb.len, Some(14 + header + 8 + 13));
        }
    }
}

/// TCP segments, from the IP layer's output to TCP, and functions of a module among the hooks.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn tcp_and_any_mixture_of_hooks() {
    const MESSAGES: usize = 50;
    let lab = Lab::new();
    for ip in Ip::BOTH {
        let receive = if ip == Ip::V4 { "tcp_v4_rcv" } else { "tcp_v6_rcv" };
        let (client, server) = lab.tcp_pair(ip);
        let (here, there) = loopback_tcp(ip);
        let probe = span(Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry(receive)).with_abandoned());
        tcp_messages(&client, &server, MESSAGES, b"over the wire");
        tcp_messages(&here, &there, MESSAGES, b"over loopback");
        let (events, ledger) = finish(probe);
        let account = only(&ledger);
        // There and back; acknowledgements of their own come on top.
        assert!(events.len() >= 4 * MESSAGES, "{ip:?} {ledger}");
        assert_eq!(account.completed, account.started - account.abandoned - account.open, "{ip:?} {ledger}");
        assert_eq!(account.unmatched, 0, "{ip:?} {ledger}");
    }

    let module = Span::between(Hook::entry("veth:veth_xmit"), Hook::exit("ip_rcv_core"));
    match LatencyProbe::builder().span(module).attach() {
        Ok(probe) => {
            let (left, right) = lab.udp_pair(Ip::V4);
            send_datagrams(&left, &right, 20, b"from a module");
            let (events, ledger) = finish(probe);
            assert_eq!(events.len(), 20, "{ledger}");
            assert!(events.iter().all(|event| event.ended_at == "ip_rcv_core:exit" && event.ret.is_some()), "{ledger}");
        }
        // No module has type information there.
        Err(error) => assert!(kernel_version() < (5, 11), "{error}"),
    }
}

/// A queueing delay of known size is measured, and only where it is.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_known_delay() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    lab.netem_delay(Side::Left, ms(30));
    let queued =
        Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("net_dev_start_xmit")).named("queued");
    let sent =
        Span::between(Hook::tracepoint("net_dev_start_xmit"), Hook::tracepoint("netif_receive_skb")).named("sent");
    let probe = LatencyProbe::builder().span(queued).span(sent).attach().unwrap();
    send_datagrams(&left, &right, 20, b"slow");
    send_datagrams(&right, &left, 20, b"fast");
    let (events, ledger) = finish(probe);
    let of =
        |name: &str| events.iter().filter(|event| event.span == name).map(|event| event.latency).collect::<Vec<_>>();
    let (mut queued, mut sent) = (of("queued"), of("sent"));
    assert_eq!((queued.len(), sent.len()), (40, 40), "{ledger}");
    queued.sort();
    sent.sort();
    assert!(queued[..20].iter().all(|latency| *latency < ms(20)), "{queued:?}");
    assert!(queued[20..].iter().all(|latency| *latency >= ms(30)), "{queued:?}");
    assert!(queued[30] < ms(45) && sent[30] < ms(10), "{queued:?} {sent:?}");
}

/// Packets that a firewall drops are abandoned, with the kernel's reason and the function that did it, not lost and not
/// paired with later ones.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn dropped_packets_are_abandoned() {
    const PACKETS: usize = 50;
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    let (unlucky, dropped) = lab.udp_pair(Ip::V4);
    lab.drop_rule(Side::Right, dropped.local_addr().unwrap().port());
    let delivered = || Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("__udp_enqueue_schedule_skb"));
    let probe = LatencyProbe::builder()
        .span(delivered().named("with").with_abandoned())
        .span(delivered().named("without").keyed_by(Key::SkbHead))
        .attach()
        .unwrap();
    for _ in 0..PACKETS {
        unlucky.send(b"into the wall").unwrap();
        send_datagrams(&left, &right, 2, b"through");
    }
    eventually("the drops are counted", || lab.dropped(Side::Right) == PACKETS as u64);
    let (events, ledger) = finish(probe);
    for name in ["with", "without"] {
        let account = ledger.get(name).unwrap();
        let counts = (account.started, account.completed, account.abandoned, account.open);
        assert_eq!(counts, (3 * PACKETS as u64, 2 * PACKETS as u64, PACKETS as u64, 0), "{ledger}");
        assert_eq!((account.overwritten, account.unmatched), (0, 0), "{ledger}");
    }
    let of = |name: &str, completed: bool| {
        events
            .iter()
            .filter(move |event| event.span == name && (event.outcome == Outcome::Completed) == completed)
            .count()
    };
    assert_eq!((of("with", true), of("with", false)), (2 * PACKETS, PACKETS), "{ledger}");
    assert_eq!((of("without", true), of("without", false)), (2 * PACKETS, 0), "{ledger}");
    for event in events.iter().filter(|event| event.outcome != Outcome::Completed) {
        let Outcome::Dropped { reason, by, .. } = &event.outcome else { panic!("{event}") };
        let name = reason.as_ref().and_then(|reason| reason.name.as_ref()).map(|name| name.to_string());
        // Reasons came with 5.17.
        let expected = (kernel_version() >= (5, 17)).then(|| "NETFILTER_DROP".to_owned());
        assert_eq!(name, expected, "{event}");
        // Since 6.7 nftables frees what it drops itself, and in 6.1 as it is maintained.
        let function = if kernel_version() < (6, 1) { "nf_hook_slow" } else { "nf_tables:nft_do_chain" };
        assert_eq!(*by, Some(function.into()), "{event}");
        assert_eq!(event.ended_at, "tp:kfree_skb");
        assert!(event.latency < PATIENCE);
    }
}

/// A request and its answer: the flow's other direction, with the time that it took to come back.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn answers_by_flow() {
    let lab = Lab::new();
    let (client, server) = lab.udp_pair(Ip::V6);
    let reply =
        Span::between(Hook::entry("udpv6_sendmsg"), Hook::tracepoint("netif_receive_skb")).keyed_by(Key::FlowReply);
    let probe = span(reply);
    for _ in 0..10 {
        send_datagrams(&client, &server, 1, b"question");
        thread::sleep(ms(20));
        send_datagrams(&server, &client, 1, b"answer");
    }
    let (events, ledger) = finish(probe);
    let (here, there) = (client.local_addr().unwrap(), server.local_addr().unwrap());
    let asked = |event: &&LatencyEvent| match event.key {
        EventKey::Flow(flow) => (flow.source().port(), flow.destination().port()) == (here.port(), there.port()),
        _ => false,
    };
    let answers: Vec<_> = events.iter().filter(asked).collect();
    assert_eq!(answers.len(), 10, "{ledger}");
    assert!(answers.iter().all(|event| event.latency >= ms(20) && event.latency < ms(500)), "{answers:?}");
    let EventKey::Flow(flow) = answers[0].key else { panic!("{:?}", answers[0]) };
    assert_eq!((flow.source().ip(), flow.destination().ip()), (here.ip(), there.ip()));
}

/// Three datagrams before one read: the latest counts, or the first, as was asked for.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn restarts() {
    let waiting = || Span::between(Hook::entry("sock_def_readable"), Hook::exit("udp_recvmsg")).keyed_by(Key::Sock);
    let probe = LatencyProbe::builder()
        .span(waiting().named("latest"))
        .span(waiting().named("first").on_restart(Restart::KeepFirst))
        .attach()
        .unwrap();
    let (here, there) = loopback_udp(Ip::V4);
    for _ in 0..3 {
        here.send(b"x").unwrap();
        thread::sleep(ms(40));
    }
    there.recv(&mut [0; 8]).unwrap();
    let (events, ledger) = finish(probe);
    let latency = |name: &str| {
        let events: Vec<_> = events.iter().filter(|event| event.span == name).collect();
        assert_eq!(events.len(), 1, "{ledger}");
        assert!(matches!(events[0].key, EventKey::Sock(address) if address != 0));
        events[0].latency
    };
    let (latest, first) = (latency("latest"), latency("first"));
    assert!(latest >= ms(40) && latest < ms(75), "{latest:?}");
    assert!(first >= ms(120) && first < ms(200), "{first:?}");
    for account in &ledger.spans {
        assert_eq!((account.started, account.completed, account.overwritten), (3, 1, 2), "{ledger}");
    }
}

/// What gets too old is expired, whether it meets its end or not, and makes room.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn old_starts_expire() {
    const ROOM: u64 = 8;
    let unread = Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_recvmsg")).keyed_by(Key::Sock);
    let builder = LatencyProbe::builder().span(unread.max_age(ms(300))).in_flight(ROOM as usize);
    let probe = builder.attach().unwrap();
    let sockets: Vec<_> = (0..30).map(|_| crate::support::udp_to_itself()).collect();
    for socket in &sockets {
        socket.send(b"x").unwrap();
    }
    let account = only(&probe.ledger()).clone();
    assert_eq!(account.started, 30);
    assert!(account.untracked > 0 && account.open >= ROOM, "{account}");
    eventually("all expire", || only(&probe.ledger()).open == 0);
    let expired = only(&probe.ledger()).expired;
    assert_eq!(expired, 30 - account.untracked);
    // One meets its end now, and still is too old.
    for socket in &sockets {
        socket.recv(&mut [0; 8]).unwrap();
    }
    let ledger = probe.ledger();
    assert_eq!((only(&ledger).completed, only(&ledger).expired), (0, expired), "{ledger}");
    // And there is room again.
    for socket in &sockets[..ROOM as usize] {
        socket.send(b"y").unwrap();
        socket.recv(&mut [0; 8]).unwrap();
    }
    let (events, ledger) = finish(probe);
    assert_eq!(events.len(), ROOM as usize, "{ledger}");
    assert!(events.iter().all(|event| event.latency < ms(300)));
}

/// Sockets that are closed and threads that end take their spans with them.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn sockets_and_threads_end() {
    let by = |key: Key| {
        let span = Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_recvmsg")).keyed_by(key);
        span.named(key.to_string()).with_abandoned()
    };
    let probe = LatencyProbe::builder().span(by(Key::Sock)).span(by(Key::Thread)).attach().unwrap();
    for _ in 0..10 {
        let socket = thread::spawn(|| {
            let socket = crate::support::udp_to_itself();
            socket.send(b"x").unwrap();
            socket
        });
        // What it sent is never read.
        drop(socket.join().unwrap());
    }
    eventually("all are gone", || probe.ledger().spans.iter().all(|account| account.open == 0));
    let (events, ledger) = finish(probe);
    for account in &ledger.spans {
        assert_eq!((account.started, account.abandoned, account.completed), (10, 10, 0), "{ledger}");
    }
    assert_eq!(events.len(), 20, "{ledger}");
    assert!(events.iter().all(|event| event.outcome == Outcome::Released), "{events:?}");
}

/// Idle CPUs all have thread number 0, and are told apart.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn idle_cpus() {
    let softirq =
        Span::between(Hook::tracepoint("softirq_entry"), Hook::tracepoint("softirq_exit")).keyed_by(Key::Thread);
    let before = Instant::now();
    let probe = LatencyProbe::builder().span(softirq).channel_capacity(1 << 18).attach().unwrap();
    let (here, there) = loopback_udp(Ip::V4);
    send_datagrams(&here, &there, 200, b"x");
    thread::sleep(ms(1_500));
    // While it stops, the ends go before the starts.
    let overwritten = only(&probe.ledger()).overwritten;
    let (events, ledger) = finish(probe);
    let took = before.elapsed();
    let mut idle = [0; 2];
    for event in &events {
        assert!(event.latency < took, "{event}");
        match event.key {
            EventKey::Idle(cpu) => {
                assert_eq!((event.tid, event.cpu_start, event.cpu_end), (0, cpu, cpu), "{event}");
                idle[cpu as usize] += 1;
            }
            EventKey::Thread(tid) => assert_eq!(tid, event.tid, "{event}"),
            other => panic!("{other:?}"),
        }
        // One does not contain another, so nothing but a mix-up is long.
        assert_eq!(event.cpu_start, event.cpu_end, "{event}");
    }
    assert!(idle.iter().all(|&count| count > 0), "{idle:?} {ledger}");
    assert_eq!(overwritten, 0, "{ledger}");
}

/// Hundreds of times as many packets as there are addresses for them: no latency is longer than the run, whatever becomes
/// of the packets, and everything adds up.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn reused_addresses() {
    const PACKETS: usize = 10_000;
    let before = Instant::now();
    // From a hook that all packets pass to one that only some of them reach, and the other way round.
    let some = Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("skb_consume_udp")).named("some reach it");
    let others = Span::between(Hook::entry("__udp_enqueue_schedule_skb"), Hook::tracepoint("net_dev_start_xmit"));
    let probe = LatencyProbe::builder()
        .span(some.with_abandoned())
        .span(others.named("none does").with_abandoned())
        .span(across().keyed_by(Key::SkbHead).with_abandoned())
        .channel_capacity(1 << 20)
        .ring_bytes(32 << 20)
        .attach()
        .unwrap();
    let (here, there) = loopback_udp(Ip::V4);
    let full = UdpSocket::bind("127.0.0.1:0").unwrap();
    let nobody = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);
    let mut since = Instant::now();
    let mut longest = Duration::ZERO;
    for n in 0..PACKETS / 4 {
        send_datagrams(&here, &there, 2, b"read");
        // Soon this receive buffer is full, and its packets are dropped.
        here_to(&full, b"unread");
        here_to_nobody(nobody);
        if n % 500 == 0 {
            longest = longest.max(since.elapsed());
            since = Instant::now();
        }
    }
    let (events, ledger) = finish(probe);
    let took = before.elapsed();
    assert!(events.iter().all(|event| event.latency < took), "{ledger}");
    let some = ledger.get("some reach it").unwrap();
    assert_eq!(some.completed, PACKETS as u64 / 2, "{ledger}");
    // What is read at once took no longer than some rounds of the loop, and never the time since an address' last use.
    let read = events.iter().filter(|event| event.span == "some reach it" && event.outcome == Outcome::Completed);
    let worst = read.map(|event| event.latency).max().unwrap();
    assert!(worst < longest.max(ms(200)), "{worst:?} of {longest:?}: {ledger}");
    assert_eq!(ledger.get("none does").unwrap().completed, 0, "{ledger}");
    assert!(ledger.get("none does").unwrap().abandoned >= PACKETS as u64 / 2, "{ledger}");
}

fn here_to(socket: &UdpSocket, payload: &[u8]) {
    socket.send_to(payload, socket.local_addr().unwrap()).unwrap();
}

/// To a port that nobody listens on; the answer says so, and isn't looked at.
fn here_to_nobody(nobody: SocketAddr) {
    thread_local!(static SOCKET: UdpSocket = UdpSocket::bind("127.0.0.1:0").unwrap());
    SOCKET.with(|socket| socket.send_to(b"to nobody", nobody).unwrap());
}

/// While packets come without end, probes come and go: what is left of one that stops pairs nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stopping_under_load() {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = SetOnDrop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                others_first();
                let (here, there) = loopback_udp(Ip::V4);
                while !stop.load(Ordering::Relaxed) {
                    send_datagrams(&here, &there, 20, b"x");
                }
            });
        }
        for _ in 0..2 {
            // No packet gets from here to there in one life.
            let never = Span::between(Hook::tracepoint("netif_receive_skb"), Hook::tracepoint("net_dev_start_xmit"));
            let never = never.on_restart(Restart::KeepFirst).named("never");
            let probe =
                LatencyProbe::builder().span(never).span(across().on_restart(Restart::KeepFirst)).attach().unwrap();
            assert!(probe.spans().iter().all(|span| span.lives_are_seen));
            thread::sleep(ms(100));
            let (events, ledger) = finish(probe);
            assert_eq!(ledger.get("never").unwrap().completed, 0, "{ledger}");
            assert!(ledger.get("across").unwrap().completed > 0, "{ledger}");
            assert!(events.iter().all(|event| event.latency < PATIENCE));
        }
    });
}

/// Many threads on all CPUs start and end the same few keys at once, in the table and in the map behind it: nothing is
/// counted twice or lost.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn contended_keys() {
    for (restart, in_flight) in [(Restart::KeepLatest, 8_192), (Restart::KeepFirst, 1), (Restart::KeepLatest, 2)] {
        let by = |key: Key| {
            let span = Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_sendmsg")).keyed_by(key);
            span.named(key.to_string()).on_restart(restart).max_age(ms(500))
        };
        let builder = LatencyProbe::builder().span(by(Key::Sock)).span(by(Key::Flow)).in_flight(in_flight);
        let probe = builder.channel_capacity(1 << 18).attach().unwrap();
        let sockets = [crate::support::udp_to_itself(), crate::support::udp_to_itself()];
        let stop = AtomicBool::new(false);
        let begin = Instant::now();
        thread::scope(|scope| {
            let _stop = SetOnDrop(&stop);
            for n in 0..8 {
                let (socket, stop) = (&sockets[n % 2], &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        // Soon nobody has room for it; sent is sent.
                        let _ = socket.send(b"x");
                    }
                });
            }
            thread::sleep(ms(1_000));
        });
        let took = begin.elapsed();
        let (events, ledger) = finish(probe);
        for account in &ledger.spans {
            // Where programs were skipped, all may be in doubt: nobody has asked in between.
            assert!(account.started > 100 && account.completed + account.doubtful > 0, "{restart:?} {ledger}");
            assert!(account.open <= 2, "{restart:?} {ledger}");
        }
        assert!(events.iter().all(|event| event.latency <= ms(500) && event.latency < took));
    }
}

/// What a kernel refuses that has no typed tracepoints, and what is left of an event there.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn plain_tracepoints() {
    let probe = LatencyProbe::builder().span(across().with_abandoned()).plain_tracepoints().attach().unwrap();
    assert!(!probe.spans()[0].typed);
    let (here, there) = loopback_udp(Ip::V6);
    send_datagrams(&here, &there, 50, b"x");
    let (events, ledger) = finish(probe);
    assert_eq!(events.len(), 50, "{ledger}");
    assert!(events.iter().all(|event| event.skb.is_some_and(|skb| skb.len.is_none())), "{ledger}");
    for key in [Key::SkbHead, Key::Flow] {
        let error = LatencyProbe::builder().span(across().keyed_by(key)).plain_tracepoints().attach().unwrap_err();
        assert!(error.to_string().contains("refuses typed tracepoints"), "{error}");
    }
}
