//! Which packets and threads: filters, decided in the kernel.

use std::ffi::CString;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::MetadataExt as _;
use std::thread;

use dwell::{Events, Filter, Hook, Key, LatencyEvent, LatencyProbe, LatencyProbeBuilder, Ledger, Span};

use crate::lab::{Lab, Side};
use crate::support::{attach_paired, finish, only, pairings, run};

fn filter(text: &str) -> Filter {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

fn of(function: &str, text: &str) -> LatencyProbeBuilder {
    LatencyProbe::builder().function(function).filter(filter(text)).identify()
}

/// A datagram to each port, over loopback, and back again to the sender's own eyes.
fn send_to_ports(ports: &[u16]) {
    for port in ports {
        let to = UdpSocket::bind(("127.0.0.1", *port)).unwrap();
        let from = UdpSocket::bind("127.0.0.1:0").unwrap();
        from.send_to(b"x", to.local_addr().unwrap()).unwrap();
        to.recv(&mut [0; 8]).unwrap();
    }
}

/// Nothing has been left behind, in the table nor in the ledger.
#[track_caller]
fn assert_clean(ledger: &Ledger) {
    assert!(ledger.is_balanced(), "{ledger}");
    let of_span = only(ledger);
    assert_eq!((of_span.open, of_span.unmatched, of_span.unparsed), (0, 0, 0), "{ledger}");
}

fn ports(events: &[LatencyEvent]) -> Vec<u16> {
    events.iter().map(|event| event.identity.unwrap().destination_port().unwrap()).collect()
}

/// What passes a filter on the port is exactly what was sent there, by every pairing, and of the rest nothing is left.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_port() {
    for pairing in pairings() {
        for (text, expected) in [
            ("udp dst port 5000", &[5000][..]),
            ("udp dst port 5000 or 5001", &[5000, 5001]),
            ("not port 5000", &[5001, 443, 47_873]),
            ("dst portrange 5000-5001", &[5000, 5001]),
            ("dst port 443", &[443]),
            ("dst port 47873", &[47_873]),
            ("local port 443", &[443]),
            ("remote port 443", &[]),
            ("tcp", &[]),
            ("udp and not (port 443 or port 47873) and not port 5001", &[5000]),
        ] {
            let probe = attach_paired(of("ip_rcv", text), *pairing);
            send_to_ports(&[5000, 5001, 443, 47_873]);
            let (events, ledger) = finish(probe);
            assert_eq!(ports(&events), expected, "{pairing:?} {text}: {ledger}");
            assert_clean(&ledger);
            assert_eq!(only(&ledger).started, expected.len() as u64, "{text}");
        }
    }
}

/// Without events there is no identity to be had, and the histogram counts what passes all the same.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn without_events() {
    for pairing in pairings() {
        let builder = LatencyProbe::builder().function("ip_rcv").filter(filter("dst port 5000")).events(Events::None);
        let probe = attach_paired(builder, *pairing);
        send_to_ports(&[5000, 5001, 5000]);
        assert_eq!(probe.histogram("ip_rcv").unwrap().count(), 2);
        let (_, ledger) = finish(probe);
        assert_clean(&ledger);
    }
}

/// By address, of both versions, and by the way in which an address is written.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_address() {
    let send = |from: &str, to: &str| {
        let to = UdpSocket::bind((to, 0)).unwrap();
        UdpSocket::bind((from, 0)).unwrap().send_to(b"x", to.local_addr().unwrap()).unwrap();
        to.recv(&mut [0; 8]).unwrap();
    };
    for (text, v4, v6) in [
        ("src host 127.0.0.2", 1, 0),
        ("dst host 127.0.0.2", 0, 0),
        ("host 127.0.0.2", 1, 0),
        ("src net 127.0.0.2/31", 1, 0),
        ("src net 127.0.0.2/32 or src net 127.0.0.0/31", 2, 0),
        ("net 127.0.0.0/8", 2, 0),
        ("host ::ffff:127.0.0.2", 1, 0),
        ("host ::1", 0, 1),
        ("net ::/64", 0, 1),
        ("net 0.0.0.0/0", 2, 0),
        ("ip", 2, 0),
        ("ip6", 0, 1),
        ("not src host 127.0.0.2", 1, 1),
    ] {
        let probe =
            LatencyProbe::builder().function("ip_rcv").function("ipv6_rcv").filter(filter(text)).attach().unwrap();
        send("127.0.0.1", "127.0.0.1");
        send("127.0.0.2", "127.0.0.1");
        send("::1", "::1");
        let (_, ledger) = finish(probe);
        let counts = ["ip_rcv", "ipv6_rcv"].map(|span| ledger.get(span).unwrap().completed);
        assert_eq!(counts, [v4, v6], "{text}: {ledger}");
        assert!(ledger.is_balanced(), "{ledger}");
    }
}

/// A socket alone tells who it is: where a program sends, there is no packet yet.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_socket() {
    let listeners = [443, 47_873].map(|port| TcpListener::bind(("127.0.0.1", port)).unwrap());
    let connected = |text: &str| {
        let probe = of("tcp_sendmsg", text).attach().unwrap();
        for listener in &listeners {
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (mut server, _) = listener.accept().unwrap();
            client.write_all(b"question").unwrap();
            server.read_exact(&mut [0; 8]).unwrap();
            server.write_all(b"answer").unwrap();
            client.read_exact(&mut [0; 6]).unwrap();
        }
        let (events, ledger) = finish(probe);
        assert_clean(&ledger);
        events.len()
    };
    assert_eq!(connected("tcp port 443"), 2);
    assert_eq!(connected("local port 443"), 1);
    assert_eq!(connected("remote port 47873"), 1);
    assert_eq!(connected("dst port 443"), 1);
    assert_eq!(connected("udp"), 0);
    assert_eq!(connected("host 127.0.0.1"), 4);
    assert_eq!(connected("mark 1"), 0);
    assert_eq!(connected("mark 0"), 4);

    // Where a datagram without a connection goes isn't known to its socket: that isn't the same as elsewhere.
    let probe = LatencyProbe::builder().function("udp_sendmsg").filter(filter("dst port 5000")).attach().unwrap();
    send_to_ports(&[5000]);
    let (_, ledger) = finish(probe);
    assert_eq!((only(&ledger).started, only(&ledger).unparsed), (0, 1), "{ledger}");
    // But this decides it.
    let probe = LatencyProbe::builder().function("udp_sendmsg").filter(filter("tcp and dst port 5000"));
    let probe = probe.attach().unwrap();
    send_to_ports(&[5000]);
    let (_, ledger) = finish(probe);
    assert_eq!((only(&ledger).started, only(&ledger).unparsed), (0, 0), "{ledger}");
}

/// Few of many: 100,000 others leave nothing behind.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn few_of_many() {
    const OTHERS: usize = 100_000;
    let wanted = UdpSocket::bind("127.0.0.1:5000").unwrap();
    let others = UdpSocket::bind("127.0.0.1:5001").unwrap();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    let probe = of("ip_rcv", "udp dst port 5000").attach().unwrap();
    let mut sent = 0;
    for n in 0..OTHERS {
        from.send_to(b"other", "127.0.0.1:5001").unwrap();
        others.recv(&mut [0; 8]).unwrap();
        if n % 5_000 == 0 {
            from.send_to(b"mine", "127.0.0.1:5000").unwrap();
            wanted.recv(&mut [0; 8]).unwrap();
            sent += 1;
        }
    }
    let open = probe.ledger().spans[0].open;
    assert_eq!(open, 0);
    let (events, ledger) = finish(probe);
    assert_eq!(events.len(), sent);
    assert!(ports(&events).iter().all(|port| *port == 5000));
    assert_clean(&ledger);
    assert_eq!(only(&ledger).started, sent as u64);
}

/// Spans between hooks: decided at the start, and the end of what was left out meets nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn of_spans() {
    for key in [Key::Skb, Key::Flow, Key::Thread] {
        let span =
            Span::between(Hook::entry("ip_local_deliver"), Hook::entry("udp_rcv")).keyed_by(key).named("deliver");
        let span = span.filter(filter("dst port 5000"));
        let probe = LatencyProbe::builder().span(span).identify().attach().unwrap();
        send_to_ports(&[5001, 5000, 5002, 5000, 5001]);
        let (events, ledger) = finish(probe);
        assert_eq!(ports(&events), [5000, 5000], "{key}: {ledger}");
        assert_clean(&ledger);
    }
}

/// Two network namespaces with the same addresses, by path, by inode, and by a process in it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_namespace() {
    let lab = Lab::new();
    let inodes =
        [Side::Left, Side::Right].map(|side| lab.on(side, || fs::metadata("/proc/thread-self/ns/net").unwrap().ino()));
    let traffic = |side, count| {
        lab.on(side, || {
            let socket = UdpSocket::bind("127.0.0.1:7777").unwrap();
            for _ in 0..count {
                socket.send_to(b"x", "127.0.0.1:7777").unwrap();
                socket.recv(&mut [0; 8]).unwrap();
            }
        });
    };
    for (inode, expected) in [(inodes[0], 2), (inodes[1], 3)] {
        for function in ["ip_rcv", "ip_output", "udp_sendmsg"] {
            let probe = of(function, &format!("netns {inode} and port 7777"));
            let probe = probe.attach().unwrap();
            traffic(Side::Left, 2);
            traffic(Side::Right, 3);
            let (events, ledger) = finish(probe);
            // A socket that isn't connected doesn't know the other port, but its own.
            assert_eq!(events.len(), expected, "{function} {inode}: {ledger}");
            assert!(events.iter().all(|event| event.identity.unwrap().netns() == Some(inode as u32)));
        }
    }
}

/// By process, thread and name, odd ones too.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_thread() {
    // Names are up to 15 bytes, of any kind.
    for name in [&b""[..], b"x", b"fifteen bytes..", b"not \xff\xfe utf-8", b"a\"b\\c d"] {
        let name_filter = Filter::comm(name);
        assert_eq!(name_filter.to_string().parse::<Filter>().unwrap(), name_filter, "{name:?}");
        let probe = LatencyProbe::builder().function("udp_sendmsg").filter(name_filter).attach().unwrap();
        send_to_ports(&[5000]);
        thread::scope(|scope| {
            scope.spawn(|| {
                set_name(name);
                send_to_ports(&[5001, 5002]);
            });
        });
        let (events, ledger) = finish(probe);
        assert_eq!(events.len(), 2, "{name:?}: {ledger}");
        assert!(events.iter().all(|event| event.comm.as_bytes() == name), "{events:?}");
        assert_clean(&ledger);
    }

    let own = std::process::id();
    for (text, expected) in [
        (format!("pid {own}"), 1),
        (format!("not pid {own}"), 0),
        (format!("tid {}", crate::support::gettid()), 1),
        ("tid 1".to_owned(), 0),
    ] {
        let probe = LatencyProbe::builder().function("udp_sendmsg").filter(filter(&text)).attach().unwrap();
        send_to_ports(&[5000]);
        let (events, _) = finish(probe);
        assert_eq!(events.len(), expected, "{text}");
    }
}

/// What a thread is called, whatever its bytes.
fn set_name(name: &[u8]) {
    let name = CString::new(name).unwrap();
    rustix::thread::set_name(&name).unwrap();
}

/// By cgroup: the sub-tree, of the socket's owner.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn by_cgroup() {
    let root = "/sys/fs/cgroup/dwell-test";
    for path in ["", "/inner", "/inner/most"] {
        fs::create_dir_all(format!("{root}{path}")).unwrap();
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap();
    let own = format!("/sys/fs/cgroup{}", own.trim().rsplit(':').next().unwrap());
    let enter = |path: &str| fs::write(format!("{path}/cgroup.procs"), std::process::id().to_string()).unwrap();
    for (path, expected) in [("", 2), ("/inner", 2), ("/inner/most", 1)] {
        let probe = of("tcp_sendmsg", &format!("cgroup {root}{path}")).attach().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        for place in [format!("{root}/inner"), format!("{root}/inner/most"), own.clone()] {
            enter(&place);
            let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            client.write_all(b"hello").unwrap();
            listener.accept().unwrap().0.read_exact(&mut [0; 5]).unwrap();
        }
        let (events, ledger) = finish(probe);
        assert_eq!(events.len(), expected, "{path}: {ledger}");
        let ids = [format!("{root}/inner"), format!("{root}/inner/most")].map(|path| fs::metadata(path).unwrap().ino());
        assert!(events.iter().all(|event| ids.contains(&event.identity.unwrap().cgroup().unwrap())), "{events:?}");
    }
    for path in ["/inner/most", "/inner", ""] {
        fs::remove_dir(format!("{root}{path}")).unwrap();
    }
}

/// A filter that asks for what isn't there, or isn't to be had at the hook, fails at once and says so.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn refused() {
    let error = |function: &str, text: &str| {
        LatencyProbe::builder().function(function).filter(filter(text)).attach().unwrap_err().to_string()
    };
    let text = error("tcp_sendmsg", "len 100-200");
    assert!(
        text.starts_with("`tcp_sendmsg` can't be filtered by length: it has no argument that is a packet"),
        "{text}"
    );
    let text = error("ip_rcv", "dev no_such_device");
    assert!(text.contains("no_such_device"), "{text}");
    let text = error("ip_rcv", "netns /no/such/file");
    assert!(text.contains("/no/such/file"), "{text}");
    let text = error("ip_rcv", "cgroup /sys/fs/cgroup/no-such-group");
    assert!(text.contains("no-such-group"), "{text}");
    run("ip link add dwell-dummy type dummy");
    let probe = LatencyProbe::builder().function("ip_rcv").filter(filter("dev dwell-dummy")).attach().unwrap();
    send_to_ports(&[5000]);
    assert_eq!(only(&finish(probe).1).started, 0);
    let probe = LatencyProbe::builder().function("ip_rcv").filter(filter("dev lo and iif lo")).attach().unwrap();
    send_to_ports(&[5000]);
    assert_eq!(only(&finish(probe).1).started, 1);
    run("ip link delete dwell-dummy");
}
