//! What holds on kernels that have no BPF trampolines on their architecture, arm64's before 6.4; beside `doctor`, this is
//! all that can be tested on one. On the others the same works.

use dwell::{Error, ErrorKind, Hook, Key, LatencyProbe, LatencyProbeBuilder, Outcome, Span};

use crate::support::{bpf_objects, eventually, finish, has_trampolines, ping_pong, udp_to_itself, until_bpf_is_gone};

#[track_caller]
fn assert_says_so(error: &Error, what: &str) {
    println!("{what}: {error}");
    match error.kind() {
        ErrorKind::TracingRefused { errno, .. } => assert_eq!(*errno, 524, "{what}"),
        other => panic!("{what}: {other:?}"),
    }
    assert_eq!(
        error.to_string(),
        "fentry/fexit programs can't be attached (errno 524): this kernel has no BPF trampolines on this architecture; \
         arm64 has them from Linux 6.4 on"
    );
}

/// Functions, also those of many arguments and those between hooks, can be had, or are refused for just this reason, with
/// nothing left behind.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn functions() {
    let function = |name: &str| LatencyProbe::builder().function(name);
    let mixed = Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("ip_rcv"));
    let within = Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_sendmsg")).keyed_by(Key::Thread);
    let probes: [(&str, LatencyProbeBuilder); 6] = [
        ("calls", function("ip_rcv")),
        ("calls by frames", function("ip_rcv").frames()),
        ("a function of a stage", LatencyProbe::builder().stage(dwell::Stage::IpReceive)),
        // Eight, which the trampolines of some kernels can't save.
        ("many arguments", function("tcp_select_initial_window")),
        ("to a function", LatencyProbe::builder().span(mixed)),
        ("within a function", LatencyProbe::builder().span(within)),
    ];
    until_bpf_is_gone();
    for (what, builder) in probes {
        match builder.attach() {
            Ok(probe) => {
                assert!(has_trampolines(), "{what}");
                assert!(probe.stop().is_balanced(), "{what}");
            }
            Err(error) if what == "many arguments" && has_trampolines() => {
                assert!(matches!(error.kind(), ErrorKind::NotTraceable { .. }), "{error}");
            }
            Err(error) => {
                assert!(!has_trampolines(), "{what}: {error}");
                assert_says_so(&error, what);
            }
        }
        eventually("nothing is left attached", || bpf_objects() == [0; 3]);
    }
}

/// Packets between tracepoints need none, whether these are typed or not: the places where packets end are functions, and
/// are done without.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn packets() {
    const DATAGRAMS: usize = 50;
    for plain in [false, true] {
        let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
        let builder = LatencyProbe::builder().span(span.with_abandoned());
        let builder = if plain { builder.plain_tracepoints() } else { builder };
        let probe = builder.attach().unwrap_or_else(|error| panic!("{error}"));
        ping_pong(&udp_to_itself(), DATAGRAMS, b"x");
        let (events, ledger) = finish(probe);
        let completed = events.iter().filter(|event| event.outcome == Outcome::Completed).count();
        assert!(completed >= DATAGRAMS, "{ledger}");
    }
}
