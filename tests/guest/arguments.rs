//! Arguments at every position, return values of every kind, functions of modules.

use std::net::UdpSocket;

use dwell::{ErrorKind, LatencyProbe, NotTraceable, Store};

use crate::support::{
    by_architecture, finish, kernel_version, only, pairings, ping_pong, probe, run, udp_to_itself, would_block,
};

/// One datagram over loopback is one packet, seen by functions that take it as their first to sixth argument.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_packet_at_any_position() {
    // (packet's position, function)
    const FUNCTIONS: [(usize, &str); 5] = [
        (5, "ip_generic_getfrag"),
        (2, "ip_output"),
        (0, "ip_rcv"),
        (1, "udp_unicast_rcv_skb"),
        (1, "__udp_enqueue_schedule_skb"),
    ];
    let names = FUNCTIONS.map(|(_, name)| name);
    let probe = probe(&names);
    ping_pong(&udp_to_itself(), 50, &[1; 100]);
    let (events, ledger) = finish(probe);
    for (position, name) in FUNCTIONS {
        let account = ledger.get(name).unwrap();
        assert_eq!((account.completed, account.delivered), (50, 50), "argument {position}: {account}");
    }
    for name in names {
        let own: Vec<_> = events.iter().filter(|event| event.span == name).collect();
        let first: Vec<_> = events.iter().filter(|event| event.span == names[0]).collect();
        for (event, first) in own.iter().zip(first) {
            let (skb, first) = (event.skb.expect("there is one"), first.skb.expect("there is one"));
            assert_eq!(skb.address, first.address, "{name} saw another packet");
            // With the IP header, or without it once it has been pulled, and without the UDP header at the end.
            assert!([Some(128), Some(108), Some(100)].contains(&skb.len), "{name}: {:?}", skb.len);
        }
    }
}

/// The fifth argument, and one that is NULL, in the IPv6 and the IPv4 route lookup.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_packet_at_the_fifth_position_or_null() {
    let probe = probe(&["ip6_pol_route", "ip_route_output_key_hash_rcu"]);
    let socket = UdpSocket::bind("[::1]:0").unwrap();
    socket.connect(socket.local_addr().unwrap()).unwrap();
    ping_pong(&socket, 20, b"six");
    ping_pong(&udp_to_itself(), 20, b"four");
    let (events, ledger) = finish(probe);
    let v6: Vec<_> = events.iter().filter(|event| event.span == "ip6_pol_route").collect();
    let v4: Vec<_> = events.iter().filter(|event| event.span == "ip_route_output_key_hash_rcu").collect();
    assert!(!v6.is_empty() && !v4.is_empty(), "{ledger}");
    // A connected socket looks its route up without a packet.
    assert!(v4.iter().all(|event| event.skb.is_none()), "{v4:?}");
    assert!(ledger.spans.iter().all(|account| account.is_lossless()), "{ledger}");
}

/// Integers keep their signs, pointers are addresses, and void is nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn return_values() {
    let probe = probe(&["udp_sendmsg", "udp_recvmsg", "sock_def_readable", "__alloc_skb"]);
    let socket = udp_to_itself();
    ping_pong(&socket, 1, &[0; 33]);
    socket.set_nonblocking(true).unwrap();
    assert!(would_block(&socket.recv(&mut [0; 1]).unwrap_err()));
    let (events, ledger) = finish(probe);
    let of =
        |name: &str| -> Vec<_> { events.iter().filter(|event| event.span == name).map(|event| event.ret).collect() };
    assert_eq!(of("udp_sendmsg"), [Some(33)], "{ledger}");
    assert_eq!(of("udp_recvmsg"), [Some(33), Some(-11)], "{ledger}");
    assert_eq!(of("sock_def_readable"), [None], "{ledger}");
    let packets = of("__alloc_skb");
    assert!(!packets.is_empty());
    // Kernel addresses are the upper half of the address space.
    assert!(packets.iter().all(|ret| ret.is_some_and(|ret| ret < -4_096)), "{packets:?}");
}

/// Functions without arguments, with one, and with more than trampolines can save on older kernels.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn every_arity() {
    let probe = probe(&["rtnl_lock", "rtnl_unlock"]);
    // By ioctl, whose handler is in another file than rtnl_lock; where netlink takes it, it is inlined.
    run("busybox ifconfig lo up");
    let (_, ledger) = finish(probe);
    for account in &ledger.spans {
        assert!(account.completed > 0 && account.is_lossless(), "{account}");
    }

    let eight = LatencyProbe::builder().function("tcp_select_initial_window").attach();
    if kernel_version() < by_architecture((6, 6), (6, 4)) {
        let error = eight.expect_err("this kernel can save six registers");
        let ErrorKind::NotTraceable { reason, .. } = error.kind() else { panic!("{error}") };
        assert!(matches!(reason, NotTraceable::TooManyArguments { words: 8, .. }), "{error}");
        return;
    }
    let probe = eight.unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (events, ledger) = finish(probe);
    assert!(!events.is_empty() && only(&ledger).is_lossless(), "{ledger}");
    assert!(events.iter().all(|event| event.ret.is_none()), "it is void: {events:?}");
}

/// A function of a module; before 5.11 kernels have no type information of modules, and the error says so.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn functions_of_modules() {
    run("modprobe dummy && ip link add mod0 type dummy && ip link set mod0 up");
    run("ip addr add 10.98.0.1/24 dev mod0 && ip neigh add 10.98.0.2 lladdr 02:00:00:00:00:02 dev mod0");
    std::thread::sleep(crate::support::ms(500));
    for name in ["dummy_xmit", "dummy:dummy_xmit"] {
        let attached = LatencyProbe::builder().function(name).attach();
        if kernel_version() < (5, 11) {
            let error = attached.expect_err("this kernel has no module BTF");
            let ErrorKind::NotTraceable { function, reason, .. } = error.kind() else { panic!("{error}") };
            assert_eq!(function, name);
            let NotTraceable::ModuleWithoutBtf { module, .. } = reason else { panic!("{error}") };
            assert_eq!(module, "dummy");
            continue;
        }
        let probe = attached.unwrap();
        assert!(probe.spans()[0].starts[0].starts_with("dummy:"), "{:?}", probe.spans());
        let socket = UdpSocket::bind("10.98.0.1:0").unwrap();
        for _ in 0..30 {
            socket.send_to(b"into the void", "10.98.0.2:9").unwrap();
        }
        let (events, ledger) = finish(probe);
        let mine: Vec<_> = events.iter().filter(|event| event.pid == std::process::id()).collect();
        assert_eq!(mine.len(), 30, "{ledger}");
        assert!(
            mine.iter().all(|event| event.span == name && event.skb.is_some_and(|skb| skb.len == Some(55))),
            "{mine:?}"
        );
    }
    run("ip link del mod0");
}

/// The probe says how it pairs, and where starts wait: in the table wherever the kernel can.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn the_choice_is_visible() {
    let probe = probe(&["ip_rcv"]);
    let info = &probe.spans()[0];
    assert_eq!(
        (info.name.as_str(), info.starts.as_slice(), info.ends.as_slice()),
        ("ip_rcv", &["ip_rcv".to_owned()][..], &["ip_rcv:exit".to_owned()][..])
    );
    assert_eq!(info.pairing, pairings()[0]);
    let table = if kernel_version() < (5, 12) { Store::HashMap } else { Store::Table };
    assert_eq!(info.store, table);
}
