//! What the kernel was doing as a span ended: its stack, its context, and how often the thread was switched out.

use dwell::{CpuContext, Events, Hook, Key, LatencyEvent, LatencyProbe, Outcome, Span, Story};

use crate::lab::{Ip, Lab, send_datagrams};
use crate::slowest::slow_receive;
use crate::support::{attach_paired, eventually, finish, gettid, ms, pairings, ping_pong, udp_to_itself};

#[track_caller]
fn story(event: &LatencyEvent) -> &Story {
    event.story.as_deref().unwrap_or_else(|| panic!("it has no story: {event}"))
}

/// The functions on its stack, the innermost first, as they were written.
fn functions(story: &Story) -> Vec<&'static str> {
    let bare = |name: &'static str| name.split('.').next().unwrap_or(name);
    story.stack.frames().iter().filter_map(|frame| Some(bare(frame.symbol?.name.as_str()))).collect()
}

/// A thread that blocks in a call shows as switched out, and where: as an event, and as one of the slowest. Quick calls
/// are below the threshold.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn blocked_threads() {
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("udp_recvmsg").min_latency(ms(200)).keep_slowest(1).stories();
        let probe = attach_paired(builder.identify(), pairing);
        ping_pong(&udp_to_itself(), 100, b"x");
        let tid = slow_receive(&probe, ms(400));
        let slowest = probe.slowest("udp_recvmsg").unwrap();
        let (events, _) = finish(probe);
        let [event] = &events[..] else { panic!("{pairing:?}: {events:?}") };
        assert_eq!(slowest.events, events);
        assert_eq!(event.tid, tid);
        let story = story(event);
        assert_eq!(story.context, Some(CpuContext::Task), "{pairing:?}: {event}");
        assert!((1..100).contains(&story.switches.unwrap()), "{pairing:?}: {event}");
        let functions = functions(story);
        assert_eq!(functions[0], "udp_recvmsg", "{}", story.stack);
        assert!(functions.contains(&"__sys_recvfrom"), "{}", story.stack);
        assert!(!story.stack.is_cut() && event.identity.is_some(), "{}", story.stack);
    }
}

/// Quick calls of a thread have run all the time, and a softirq's can't but: it is told from the thread that it has
/// interrupted.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn threads_and_softirqs() {
    const DATAGRAMS: usize = 50;
    for &pairing in pairings() {
        let builder = LatencyProbe::builder().function("ip_rcv").function("udp_sendmsg").stories();
        let probe = attach_paired(builder, pairing);
        ping_pong(&udp_to_itself(), DATAGRAMS, b"x");
        let (events, _) = finish(probe);
        let of = |function: &'static str| events.iter().filter(move |event| event.span == function);
        for (function, context) in [("ip_rcv", CpuContext::Softirq), ("udp_sendmsg", CpuContext::Task)] {
            // Others' packets are among them.
            assert!(of(function).count() >= DATAGRAMS, "{}", of(function).count());
            for event in of(function) {
                assert_eq!(story(event).context, Some(context), "{event}");
                assert_eq!(functions(story(event))[0], function, "{}", story(event).stack);
            }
        }
        assert!(of("ip_rcv").all(|event| story(event).switches == Some(0)));
        let undisturbed = of("udp_sendmsg").filter(|event| story(event).switches == Some(0)).count();
        assert!(undisturbed >= DATAGRAMS / 2, "{undisturbed}");
        // The loopback device hands a datagram over within the call that sends it.
        let within = of("ip_rcv").filter(|event| functions(story(event)).contains(&"udp_sendmsg")).count();
        assert!(within >= DATAGRAMS / 2, "{within}");
    }
}

/// The timer's interrupt, and the idle task.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn interrupts_and_idle() {
    for (function, context) in
        [("update_process_times", CpuContext::Hardirq), ("tick_nohz_idle_enter", CpuContext::Idle)]
    {
        let probe = LatencyProbe::builder().function(function).stories().attach().unwrap();
        let events = probe.events().clone();
        eventually(function, || !events.is_empty());
        let (events, _) = finish(probe);
        assert!(!events.is_empty());
        for event in &events {
            let story = story(event);
            assert_eq!(story.context, Some(context), "{event}");
            assert!(context != CpuContext::Idle || event.tid == 0, "{event}");
            assert_eq!(functions(story)[0], function, "{}", story.stack);
        }
    }
}

/// Between hooks: where it ends is where the stack begins. Only of one thread it can be said how often it was switched
/// out.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn between_hooks() {
    let crossing = Span::between(Hook::tracepoint("net_dev_queue"), Hook::entry("ip_rcv")).named("crossing");
    let receiving = Span::between(Hook::entry("udp_recvmsg"), Hook::exit("udp_recvmsg")).named("udp_recvmsg");
    let reached = Span::between(Hook::entry("ip_output"), Hook::tracepoint("netif_receive_skb")).named("reached");
    let builder = [crossing, receiving.keyed_by(Key::Thread), reached]
        .into_iter()
        .fold(LatencyProbe::builder().stories(), |builder, span| builder.span(span));
    let probe = builder.attach().unwrap();
    ping_pong(&udp_to_itself(), 20, b"x");
    let tid = slow_receive(&probe, ms(400));
    let (events, _) = finish(probe);
    let mine = |span: &'static str| events.iter().filter(move |event| event.span == span);
    assert!(mine("crossing").count() >= 20 && mine("reached").count() >= 20);
    for event in mine("crossing") {
        assert_eq!((story(event).switches, story(event).context), (None, Some(CpuContext::Softirq)), "{event}");
        assert_eq!(functions(story(event))[0], "ip_rcv", "{}", story(event).stack);
    }
    for event in mine("reached") {
        let functions = functions(story(event));
        // What has the tracepoint, or what the compiler has made that a part of.
        assert!(functions[0].contains("netif_receive_skb"), "{}", story(event).stack);
    }
    let blocked = mine("udp_recvmsg").find(|event| event.tid == tid && event.latency >= ms(400)).unwrap();
    assert!(story(blocked).switches >= Some(1), "{blocked}");
    let quick = mine("udp_recvmsg").filter(|event| event.tid == gettid() && story(event).switches == Some(0));
    assert!(quick.count() >= 10);
}

/// Code of modules is written with the module's name.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn modules() {
    let lab = Lab::new();
    let (left, right) = lab.udp_pair(Ip::V4);
    let probe = LatencyProbe::builder().function("eth_type_trans").stories().attach().unwrap();
    send_datagrams(&left, &right, 10, b"x");
    let (events, _) = finish(probe);
    let sent: Vec<_> = events.iter().filter(|event| functions(story(event)).contains(&"udp_sendmsg")).collect();
    assert!(sent.len() >= 10, "{events:?}");
    for event in sent {
        let text = story(event).stack.to_string();
        let line = text.lines().find(|line| line.starts_with("veth_xmit+0x"));
        assert!(line.is_some_and(|line| line.ends_with(" [veth]")), "{text}");
    }
}

/// A packet that nobody wants: who has dropped it is on the stack.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn dropped() {
    let span = Span::between(Hook::entry("ip_rcv"), Hook::entry("udp_queue_rcv_skb")).with_abandoned();
    let builder = LatencyProbe::builder().span(span.named("received")).events(Events::All).stories();
    let probe = builder.attach().unwrap();
    let nobody = udp_to_itself().local_addr().unwrap();
    std::net::UdpSocket::bind("127.0.0.1:0").unwrap().send_to(b"x", nobody).unwrap();
    let (events, ledger) = finish(probe);
    let dropped = events.iter().find_map(|event| match event.outcome {
        Outcome::Dropped { by, .. } => Some((event, by.expect("addresses can be seen"))),
        _ => None,
    });
    let Some((event, by)) = dropped else { panic!("{ledger} {events:?}") };
    assert!(functions(story(event)).contains(&by.as_str()), "{by}: {}", story(event).stack);
    assert_eq!(story(event).context, Some(CpuContext::Softirq));
}
