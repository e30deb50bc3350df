//! Each stage, on each kernel, measures what it says, and how often it says.

use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use dwell::{ErrorKind, Events, LatencyEvent, LatencyProbe, Ledger, Stage};
use libbpf_rs::{Xdp, XdpFlags, libbpf_sys};

use crate::lab::{DEVICE, Ip, Lab, Side, burst, loopback_tcp, loopback_udp, send_datagrams, tcp_messages};
use crate::support::{PATIENCE, eventually, finish, kernel_version, run};

/// More than an emulated machine adds to a delay.
const SLACK: Duration = Duration::from_millis(1_000);

fn probe(stages: &[Stage]) -> LatencyProbe {
    attach(stages, Events::All)
}

/// A probe that only counts, whose programs are smaller, and sooner verified.
fn counter(stages: &[Stage]) -> LatencyProbe {
    attach(stages, Events::None)
}

fn attach(stages: &[Stage], events: Events) -> LatencyProbe {
    let builder = stages.iter().fold(LatencyProbe::builder(), |builder, &stage| builder.stage(stage));
    builder.events(events).attach().unwrap_or_else(|error| panic!("{error}"))
}

/// The ledger once nothing is in flight: softirqs may still be on their way out when what they brought has been read.
fn settled(probe: &LatencyProbe) -> Ledger {
    eventually("all has ended", || probe.ledger().spans.iter().all(|account| account.open == 0));
    probe.ledger()
}

/// What a probe had counted before and after.
struct Passed {
    before: Ledger,
    after: Ledger,
}

fn passed(probe: &LatencyProbe, traffic: impl FnOnce()) -> Passed {
    let before = settled(probe);
    traffic();
    Passed { before, after: settled(probe) }
}

impl Passed {
    /// How often a stage was passed to its end.
    #[track_caller]
    fn count(&self, stage: Stage) -> u64 {
        let [before, after] =
            [&self.before, &self.after].map(|ledger| ledger.get(stage.name()).expect("it is measured"));
        assert_eq!((after.missed, after.missed_exits), (0, 0), "the kernel has skipped programs: {after}");
        after.completed - before.completed
    }

    #[track_caller]
    fn assert(&self, expected: &[(Stage, u64)]) {
        let seen: Vec<_> = expected.iter().map(|&(stage, _)| (stage, self.count(stage))).collect();
        assert_eq!(seen, expected);
    }
}

/// The next event of a stage.
#[track_caller]
fn next(probe: &LatencyProbe, stage: Stage) -> LatencyEvent {
    loop {
        let event = probe.events().recv_timeout(PATIENCE).unwrap_or_else(|error| panic!("{stage}: {error}"));
        if event.span == stage.name() {
            return event;
        }
    }
}

#[track_caller]
fn assert_within(event: &LatencyEvent, from: Duration) {
    assert!((from..from + SLACK).contains(&event.latency), "{event}: not from {from:?} on");
}

/// Datagrams of sockets that aren't connected, so that each is routed.
fn unconnected(lab: &Lab, ip: Ip, count: usize) {
    let bind = |side: Side| lab.on(side, || UdpSocket::bind((side.address(ip), 0)).expect("a free port"));
    let (left, right) = (bind(Side::Left), bind(Side::Right));
    right.set_read_timeout(Some(PATIENCE)).expect("any timeout goes");
    let target = right.local_addr().expect("it is bound");
    for _ in 0..count {
        left.send_to(b"routed", target).expect("sent");
        right.recv(&mut [0; 16]).expect("received");
    }
}

/// Runs nft with these rules on the thread's host.
fn nft(rules: &str) {
    run(&format!("nft '{rules}'"));
}

/// A chain at each hook, each with a rule.
fn every_hook() {
    let hooks = ["prerouting", "input", "forward", "output", "postrouting"];
    let chains = hooks.map(|hook| format!("chain {hook} {{ type filter hook {hook} priority 0; counter; }}"));
    nft(&format!("table inet every {{\n{}\n}}", chains.join("\n")));
}

fn is_loaded(module: &str) -> bool {
    Path::new("/sys/module").join(module).join("initstate").exists()
}

/// What a kernel is known to lack is explained, by name; everything else is there, and all of it at once.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn each_resolves_or_explains() {
    const MODULES: [&str; 4] = ["nf_tables", "ip_tables", "ip6_tables", "nf_conntrack"];
    // What there is to say of a module, as long as it isn't loaded and then, if it makes a difference.
    let said = |module: &str| {
        if !is_loaded(module) {
            Some(format!("its module {module} isn't loaded (`modprobe {module}`)"))
        } else if kernel_version() < (5, 11) {
            Some(format!("it is in module {module}, of which this kernel has no type information"))
        } else {
            None
        }
    };
    for load in [None, Some(&["nf_tables", "nf_conntrack"][..]), Some(&MODULES)] {
        for module in load.into_iter().flatten() {
            run(&format!("modprobe {module}"));
        }
        // To the others modules make no difference: all are attached below, with the modules loaded.
        let stages = if load.is_none() { Stage::ALL } else { &[Stage::FirewallRules, Stage::Conntrack] };
        for &stage in stages {
            let modules = match stage {
                Stage::FirewallRules => &MODULES[..3],
                Stage::Conntrack => &MODULES[3..],
                _ => &[],
            };
            let said: Vec<_> = modules.iter().filter_map(|module| said(module)).collect();
            match stage.resolve() {
                Ok(plan) => {
                    println!("{plan} (missing: {:?})", plan.missing);
                    assert!(said.is_empty() || said.len() < modules.len(), "{plan}");
                    assert_eq!(plan.missing.len(), said.len(), "{plan}: {:?}", plan.missing);
                    assert!(plan.missing.iter().zip(&said).all(|(why, said)| why.contains(said)), "{:?}", plan.missing);
                }
                Err(error) => {
                    println!("{error}");
                    let ErrorKind::StageUnavailable { stage: unavailable, reasons, .. } = error.kind() else {
                        panic!("{error}");
                    };
                    assert!(*unavailable == stage && said.len() == modules.len() && !said.is_empty(), "{error}");
                    assert!(said.iter().all(|said| reasons.iter().any(|why| why.contains(said))), "{error}");
                }
            }
        }
    }

    let builder = Stage::ALL.iter().fold(LatencyProbe::builder(), |builder, &stage| builder.stage(stage));
    let probe = builder.best_effort().attach().unwrap();
    let failed: Vec<_> = probe.failures().iter().map(|failure| failure.span.to_string()).collect();
    let lacking: &[&str] = if kernel_version() < (5, 11) { &["firewall-rules", "conntrack"] } else { &[] };
    assert_eq!(failed, lacking, "{:?}", probe.failures());
    for ip in Ip::BOTH {
        let (a, b) = loopback_udp(ip);
        send_datagrams(&a, &b, 20, b"all at once");
        let (client, server) = loopback_tcp(ip);
        tcp_messages(&client, &server, 20, b"all at once");
    }
    settled(&probe);
    let (_, ledger) = finish(probe);
    println!("{ledger}");
    // On loopback nothing is merged, forwarded, filtered or routed to.
    for stage in ["napi-poll", "ip-receive", "ip-send", "neighbour", "qdisc", "driver-transmit", "tcp-receive"] {
        assert!(ledger.get(stage).unwrap().completed >= 40, "{stage}: {ledger}");
    }
    for stage in ["tcp-send", "udp-receive", "udp-send", "socket-queue"] {
        assert!(ledger.get(stage).unwrap().completed >= 40, "{stage}: {ledger}");
    }
    assert_eq!(ledger.get("accept").unwrap().completed, 2, "{ledger}");
    assert_eq!(ledger.get("gro").unwrap().completed, 0, "{ledger}");
}

/// Datagrams that are forwarded: how often each part of the way is gone is known.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stages_of_forwarded_datagrams() {
    const COUNT: u64 = 40;
    let lab = Lab::forwarding();
    // So that packets are routed also where a socket is known.
    lab.right(|| std::fs::write("/proc/sys/net/ipv4/ip_early_demux", "0").unwrap());
    let probe = counter(&[
        Stage::NapiPoll,
        Stage::RouteInput,
        Stage::RouteOutput,
        Stage::RouteIpv6,
        Stage::IpReceive,
        Stage::IpSend,
        Stage::Neighbour,
        Stage::Qdisc,
        Stage::DriverTransmit,
        Stage::UdpReceive,
        Stage::UdpSend,
        Stage::SocketQueue,
    ]);
    for ip in Ip::BOTH {
        let passed = passed(&probe, || unconnected(&lab, ip, COUNT as usize));
        let (v4, v6) = if ip == Ip::V4 { (COUNT, 0) } else { (0, COUNT) };
        passed.assert(&[
            // In the middle and on the right; on the left.
            (Stage::RouteInput, 2 * v4),
            (Stage::RouteOutput, v4),
            (Stage::RouteIpv6, (2 + 1) * v6),
            (Stage::IpReceive, 2 * COUNT),
            (Stage::IpSend, COUNT),
            // On the left and in the middle.
            (Stage::Neighbour, 2 * COUNT),
            (Stage::Qdisc, 2 * COUNT),
            (Stage::DriverTransmit, 2 * COUNT),
            (Stage::UdpReceive, COUNT),
            (Stage::UdpSend, COUNT),
            (Stage::SocketQueue, COUNT),
        ]);
        assert!(passed.count(Stage::NapiPoll) >= COUNT, "{}", passed.count(Stage::NapiPoll));
    }
    for span in probe.spans() {
        let histogram = probe.histogram(&span.name).unwrap();
        assert!(histogram.max() < Some(SLACK), "{}: {histogram}", span.name);
    }
    let _ = finish(probe);
}

/// TCP over either protocol: each message is a call of `send()`, and a segment at least.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn stages_of_tcp() {
    const COUNT: u64 = 30;
    let lab = Lab::new();
    let probe = counter(&[Stage::TcpReceive, Stage::TcpSend, Stage::IpReceive, Stage::IpSend, Stage::SocketQueue]);
    for ip in Ip::BOTH {
        let (client, server) = lab.tcp_pair(ip);
        let passed = passed(&probe, || tcp_messages(&client, &server, COUNT as usize, &[1; 300]));
        passed.assert(&[(Stage::TcpSend, 2 * COUNT), (Stage::SocketQueue, 2 * COUNT)]);
        // Delayed acknowledgements are segments, too.
        for stage in [Stage::TcpReceive, Stage::IpReceive, Stage::IpSend] {
            assert!((2 * COUNT..4 * COUNT).contains(&passed.count(stage)), "{stage}: {}", passed.count(stage));
        }
    }
    let _ = finish(probe);
}

/// With classifiers on both ways, each way counts what goes it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn tc_ingress_is_not_egress() {
    const COUNT: u64 = 30;
    let lab = Lab::new();
    let probe = counter(&[Stage::TcIngress, Stage::TcEgress]);
    let both = |ip| {
        let (left, right) = lab.udp_pair(ip);
        send_datagrams(&left, &right, COUNT as usize, b"to the right");
        send_datagrams(&right, &left, 2 * COUNT as usize, b"to the left");
    };
    let unfiltered = passed(&probe, || Ip::BOTH.into_iter().for_each(both));
    unfiltered.assert(&[(Stage::TcIngress, 0), (Stage::TcEgress, 0)]);
    lab.ingress_filter(Side::Right);
    for ip in Ip::BOTH {
        let filtered = passed(&probe, || both(ip));
        filtered.assert(&[(Stage::TcIngress, COUNT), (Stage::TcEgress, 2 * COUNT)]);
    }
    assert_eq!(lab.filtered(Side::Right), (2 * COUNT, 4 * COUNT));
    let (_, ledger) = finish(probe);
    assert!(ledger.spans.iter().all(|account| account.unmatched == 0), "{ledger}");
}

/// Rules at each of netfilter's hooks of three hosts: each hook counts the packets that pass it, and no others.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn netfilter_hooks_are_told_apart() {
    const COUNT: u64 = 30;
    const HOOKS: [(Stage, u64); 5] = [
        (Stage::NetfilterPreRouting, 2 * COUNT),
        (Stage::NetfilterLocalIn, COUNT),
        (Stage::NetfilterForward, COUNT),
        (Stage::NetfilterLocalOut, COUNT),
        (Stage::NetfilterPostRouting, 2 * COUNT),
    ];
    let has_modules = kernel_version() >= (5, 11);
    let lab = Lab::forwarding();
    lab.left(every_hook);
    lab.middle(every_hook);
    lab.right(every_hook);
    lab.right(|| nft("add rule inet every input ct state new counter"));
    let mut stages: Vec<_> = HOOKS.iter().map(|(hook, _)| *hook).collect();
    if has_modules {
        stages.extend([Stage::FirewallRules, Stage::Conntrack]);
    }
    let probe = counter(&stages);
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        let passed = passed(&probe, || send_datagrams(&left, &right, COUNT as usize, b"filtered"));
        passed.assert(&HOOKS);
        if has_modules {
            let chains = HOOKS.iter().map(|(_, count)| count).sum();
            // Only the right knows of connections, of which there is one.
            passed.assert(&[(Stage::FirewallRules, chains), (Stage::Conntrack, COUNT + 1)]);
        }
    }
    let _ = finish(probe);
}

/// What comes out of a tunnel is merged if it can be, and received in lists. Netfilter sees each packet of those once.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn gro_and_its_lists() {
    const COUNT: u64 = 30;
    let lab = Lab::new();
    for (side, local, remote) in [(Side::Left, 1, 2), (Side::Right, 2, 1)] {
        lab.on(side, || {
            run(&format!("ip link add tunnel type ipip local 10.77.0.{local} remote 10.77.0.{remote}"));
            run("ip link set tunnel addrgenmode none multicast off up");
            run(&format!("ip address add 10.78.0.{local} peer 10.78.0.{remote} dev tunnel"));
        });
    }
    lab.right(every_hook);
    let bind =
        |side: Side, n: u8| lab.on(side, || UdpSocket::bind((Ipv4Addr::new(10, 78, 0, n), 0)).expect("a free port"));
    let (left, right) = (bind(Side::Left, 1), bind(Side::Right, 2));
    left.connect(right.local_addr().unwrap()).unwrap();
    right.set_read_timeout(Some(PATIENCE)).unwrap();
    let probe = counter(&[Stage::Gro, Stage::NetfilterPreRouting, Stage::NetfilterLocalIn, Stage::IpReceive]);
    let passed = passed(&probe, || {
        send_datagrams(&left, &right, COUNT as usize, b"one by one");
        burst(&left, &right, COUNT as usize, b"at once");
    });
    // Tunnel and datagram are each a packet for IP. Datagrams aren't merged unless someone asks for it.
    passed.assert(&[
        (Stage::Gro, 2 * COUNT),
        (Stage::NetfilterPreRouting, 4 * COUNT),
        (Stage::NetfilterLocalIn, 4 * COUNT),
        (Stage::IpReceive, 4 * COUNT),
    ]);
    let _ = finish(probe);
}

/// A program that passes every packet on.
#[allow(unsafe_code, reason = "libbpf-rs loads programs from objects only")]
fn xdp_pass() -> OwnedFd {
    // r0 = XDP_PASS; exit
    let code = [(0xb7, 2), (0x95, 0)].map(|(code, imm)| libbpf_sys::bpf_insn { code, imm, ..Default::default() });
    // SAFETY: the strings end with a NUL, the instructions are as many as is said, and no options are given.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_XDP,
            c"pass".as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr(),
            code.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        )
    };
    assert!(fd >= 0, "loading an XDP program: {fd}");
    // SAFETY: it has just been opened, and nobody else knows of it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// An XDP program outside the driver runs on each packet that comes in.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn generic_xdp() {
    const COUNT: u64 = 30;
    let lab = Lab::new();
    let probe = counter(&[Stage::GenericXdp]);
    let program = xdp_pass();
    lab.right(|| {
        let link = run(&format!("ip -o link show dev {DEVICE}"));
        let index = link.split(':').next().and_then(|index| index.parse().ok()).expect("INDEX: NAME...");
        Xdp::new(program.as_fd()).attach(index, XdpFlags::SKB_MODE).unwrap();
    });
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        let passed = passed(&probe, || {
            send_datagrams(&left, &right, COUNT as usize, b"to the right");
            send_datagrams(&right, &left, COUNT as usize, b"to the left");
        });
        passed.assert(&[(Stage::GenericXdp, COUNT)]);
    }
    let _ = finish(probe);
}

/// What a device holds back shows as waiting in its queue, and in the way to the queue of nobody.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_queue_of_a_slow_device() {
    const DELAY: Duration = Duration::from_millis(20);
    let lab = Lab::new();
    let probe = probe(&[Stage::Qdisc, Stage::IpSend, Stage::DriverTransmit]);
    lab.netem_delay(Side::Left, DELAY);
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        let passed = passed(&probe, || burst(&left, &right, 20, b"delayed"));
        passed.assert(&[(Stage::Qdisc, 20), (Stage::IpSend, 20)]);
        // The driver may get several at once.
        assert!((1..=20).contains(&passed.count(Stage::DriverTransmit)));
    }
    let (events, _) = finish(probe);
    let mut latencies: Vec<_> =
        events.iter().filter(|event| event.span == Stage::Qdisc.name()).map(|event| event.latency).collect();
    latencies.sort();
    // To the ticks in which the kernel counts the delay.
    assert!(latencies[0] >= DELAY - Duration::from_micros(1), "{latencies:?}");
    assert!(latencies[latencies.len() / 2] < DELAY + SLACK, "{latencies:?}");
    let sent = events.iter().filter(|event| event.span != Stage::Qdisc.name());
    let mut sent: Vec<_> = sent.map(|event| event.latency).collect();
    sent.sort();
    assert!(sent[sent.len() / 2] < DELAY, "{sent:?}");
}

/// A packet waits until its neighbour has answered.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_slow_neighbour() {
    const DELAY: Duration = Duration::from_millis(30);
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    let probe = probe(&[Stage::Neighbour]);
    let known = passed(&probe, || send_datagrams(&left, &right, 1, b"known"));
    known.assert(&[(Stage::Neighbour, 1)]);
    assert!(next(&probe, Stage::Neighbour).latency < DELAY);

    lab.netem_delay(Side::Right, DELAY);
    lab.right(|| run(&format!("ip link set {DEVICE} arp on")));
    lab.left(|| run(&format!("ip link set {DEVICE} arp on; ip neigh flush dev {DEVICE} nud all")));
    let asked = passed(&probe, || send_datagrams(&left, &right, 1, b"asked for"));
    // A device that may ask for neighbours also asks, over IPv6, whether its own address is free.
    assert!(asked.count(Stage::Neighbour) >= 1);
    let (events, _) = finish(probe);
    let latencies: Vec<_> = events.iter().map(|event| event.latency).collect();
    assert!(latencies.iter().any(|latency| (DELAY..DELAY + SLACK).contains(latency)), "{latencies:?}");
}

/// What lies in a socket waits for whoever reads it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_slow_reader() {
    const WAIT: Duration = Duration::from_millis(30);
    let lab = Lab::new();
    let probe = probe(&[Stage::SocketQueue]);
    for ip in Ip::BOTH {
        let (left, right) = lab.udp_pair(ip);
        let datagram = |wait| {
            left.send(b"datagram").unwrap();
            sleep(wait);
            right.recv(&mut [0; 16]).unwrap();
            next(&probe, Stage::SocketQueue)
        };
        assert_within(&datagram(WAIT), WAIT);
        assert_within(&datagram(Duration::ZERO), Duration::ZERO);

        let (client, server) = lab.tcp_pair(ip);
        let receive = |len: usize| std::io::Read::read_exact(&mut &server, &mut vec![0; len]).unwrap();
        let send = |data: &[u8]| std::io::Write::write_all(&mut &client, data).unwrap();
        send(b"stream");
        sleep(WAIT);
        // The first byte counts.
        receive(1);
        assert_within(&next(&probe, Stage::SocketQueue), WAIT);
        let rest = passed(&probe, || receive(5));
        rest.assert(&[(Stage::SocketQueue, 0)]);

        // What isn't read goes with its socket.
        let before = settled(&probe);
        left.send(b"never read").unwrap();
        eventually("it is there", || probe.ledger().spans[0].open == 1);
        drop(right);
        let after = settled(&probe);
        assert_eq!(after.spans[0].abandoned, before.spans[0].abandoned + 1, "{after}");
    }
    let _ = finish(probe);
}

/// Connections that wait to be accepted, and one that nobody wants.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn a_slow_accept() {
    const WAIT: Duration = Duration::from_millis(30);
    let lab = Lab::new();
    let probe = probe(&[Stage::Accept]);
    for ip in Ip::BOTH {
        let listener = lab.right(|| TcpListener::bind((Side::Right.address(ip), 0)).unwrap());
        let address = listener.local_addr().unwrap();
        let connect = || lab.left(|| TcpStream::connect_timeout(&address, PATIENCE).unwrap());
        let client = connect();
        eventually("it is established", || probe.ledger().spans[0].open == 1);
        sleep(WAIT);
        let accepted = listener.accept().unwrap();
        let event = next(&probe, Stage::Accept);
        assert_within(&event, WAIT);
        drop((client, accepted));

        let unwanted = connect();
        eventually("it is established", || probe.ledger().spans[0].open == 1);
        let before = probe.ledger().spans[0].abandoned;
        drop(listener);
        drop(unwanted);
        let after = settled(&probe);
        assert_eq!(after.spans[0].abandoned, before + 1, "{after}");
        assert_eq!(after.spans[0].overwritten, 0, "{after}");
    }
    let (events, _) = finish(probe);
    assert!(events.is_empty(), "{events:?}");
}
