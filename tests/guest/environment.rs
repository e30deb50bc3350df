//! Environments that aren't as they should be: little memory, other namespaces, what is hidden, damaged or switched off.

use std::fs;
use std::io::IoSliceMut;
use std::os::fd::AsFd;
use std::process::{Command, Output};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dwell::{Error, ErrorKind, Events, Hook, LatencyProbe, LatencyProbeBuilder, Memory, NotTraceable, Span, Stage};
use libbpf_rs::MapHandle;
use libbpf_rs::query::MapInfoIter;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};
use serde_json::Value;

use crate::support::{
    bpf_objects, eventually, example, finish, kernel_version, ms, only, ping_pong, probe, run, shell, udp_to_itself,
    until_bpf_is_gone,
};

/// Emulation is some twenty times slower than the machines for which a second is promised.
const SOON: u64 = 15_000;

/// `watch` for JSON, after a shell's words, with these arguments.
fn watch(before: &str, arguments: &str) -> Output {
    let started = Instant::now();
    let output = shell(&format!("{before} {} --json {arguments}", example("watch").display()));
    assert!(started.elapsed() < ms(2 * SOON), "{before} {arguments}: {:?}", started.elapsed());
    output
}

/// It must fail, with nothing but one line, which is returned.
#[track_caller]
fn watch_fails(before: &str, arguments: &str) -> String {
    let Output { status, stdout, stderr } = watch(before, arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stderr.lines().count()), (Some(2), 1), "{before} {arguments}: {stderr}");
    assert!(stdout.is_empty());
    println!("{stderr}");
    stderr
}

/// It must have worked; what it printed.
#[track_caller]
fn watch_works(before: &str, arguments: &str) -> Vec<Value> {
    let Output { status, stdout, stderr } = watch(before, arguments);
    assert!(status.success(), "{before} {arguments}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// In a mount namespace of its own, after this.
fn after(preparation: &str) -> String {
    format!("unshare -m sh -c '{preparation} && exec \"$@\"' sh")
}

/// What the kernel has of maps, by its own account: all that there are, whoever holds them.
fn map_bytes() -> u64 {
    let bytes = |id| {
        let map = MapHandle::from_map_id(id).expect("it is there");
        let path = format!("/proc/self/fdinfo/{}", std::os::fd::AsRawFd::as_raw_fd(&map.as_fd()));
        let text = fs::read_to_string(path).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("memlock:")).expect("it tells");
        line.trim().parse::<u64>().unwrap()
    };
    MapInfoIter::default().map(|map| bytes(map.id)).sum()
}

fn possible_cpus() -> u64 {
    libbpf_rs::num_possible_cpus().unwrap() as u64
}

/// A probe says what it takes, and it is what the kernel says of all maps. What each CPU adds, online or not, is bounded.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn memory() {
    let builder = LatencyProbe::builder;
    let span = Span::function("ip_rcv").grouped_by(dwell::GroupBy::Interface);
    let cases: [(&str, LatencyProbeBuilder); 4] = [
        ("default", builder().function("ip_rcv")),
        ("silent", builder().function("ip_rcv").events(Events::None)),
        ("more", builder().span(span).stage(Stage::SocketQueue).identify().keep_slowest(8).in_flight(20_000)),
        ("batches", builder().function("ip_rcv").in_batches(100).channel_capacity(1_000)),
    ];
    for (name, builder) in cases {
        until_bpf_is_gone();
        let probe = builder.attach().unwrap();
        let memory: Memory = probe.memory();
        println!("{name}: {memory}: {memory:?}, {} CPUs", possible_cpus());
        let actual = map_bytes();
        assert!(memory.maps.abs_diff(actual) * 10 <= actual, "{name}: {memory:?}, and there is {actual}");
        assert!((4 << 10..1 << 20).contains(&memory.programs), "{name}: {memory:?}");
        assert_eq!(memory.kernel(), memory.maps + memory.programs);
        // As the documentation has it.
        let most = if name == "more" { 16 << 20 } else { 5 << 20 } + possible_cpus() * (144 << 10);
        assert!(memory.maps <= most, "{name}: {memory:?}, and {most} is promised");
        if name == "silent" {
            // Neither rings nor more than a histogram for each CPU.
            assert!(memory.maps <= (3 << 19) + possible_cpus() * (16 << 10), "{memory:?}");
        }
        let events = if name == "batches" { 1_000 } else { 16_384 };
        assert!((events * 200..events * 400).contains(&memory.channel) || name == "silent", "{name}: {memory:?}");
        let before = probe.memory();
        ping_pong(&udp_to_itself(), 10, b"x");
        assert_eq!(probe.memory(), before);
    }
}

/// A cgroup in which this process is, as long as it lives.
struct Cgroup(&'static str);

impl Cgroup {
    fn enter(path: &'static str, memory_max: &str) -> Self {
        run(&format!(
            "echo +memory >/sys/fs/cgroup/cgroup.subtree_control && mkdir {path} && echo {memory_max} >{path}/memory.max"
        ));
        fs::write(format!("{path}/cgroup.procs"), std::process::id().to_string()).unwrap();
        Self(path)
    }

    fn killed(&self) -> bool {
        let events = fs::read_to_string(format!("{}/memory.events", self.0)).unwrap();
        !events.lines().any(|line| line == "oom_kill 0")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        fs::write("/sys/fs/cgroup/cgroup.procs", std::process::id().to_string()).unwrap();
        // What was charged to it keeps it, but not its directory.
        fs::remove_dir(self.0).unwrap();
    }
}

/// 64 MiB are plenty. What doesn't fit gives an error of which nothing is left, and nobody is killed. Before 5.11 the
/// kernel doesn't count maps there.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn little_memory() {
    until_bpf_is_gone();
    let cgroup = Cgroup::enter("/sys/fs/cgroup/little", "64M");
    let small = probe(&["ip_rcv"]);
    ping_pong(&udp_to_itself(), 20, b"x");
    assert_eq!(finish(small).0.len(), 20);
    until_bpf_is_gone();

    let large = LatencyProbe::builder().function("ip_rcv").in_flight(1 << 20).attach();
    if kernel_version() < (5, 11) {
        drop(large.expect("it isn't counted"));
    } else {
        let error = large.expect_err("it takes 100 MiB");
        println!("{error}");
        assert!(matches!(error.kind(), ErrorKind::System { errno: 12, .. }), "{error}");
        assert!(error.to_string().contains("Cannot allocate memory"), "{error}");
    }
    eventually("nothing is left", || bpf_objects() == [0; 3]);
    assert!(!cgroup.killed());
    // It isn't the worse for it.
    drop(probe(&["ip_rcv"]));
}

const CONTAINER: &str = "unshare --pid --fork --mount-proc";

/// In a pid namespace pids and tids can't be filtered by, and the error says so: they would be others' numbers.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn pid_namespaces_and_filters() {
    for filter in ["pid 1", "tid 1", "udp and not (comm x or pid 1)"] {
        for namespace in [CONTAINER, "unshare --pid --fork"] {
            let text = watch_fails(namespace, &format!("--function udp_sendmsg --filter '{filter}'"));
            assert!(text.contains("the kernel knows host pids") && text.contains("--pid=host"), "{text}");
        }
    }
    // A name is the same everywhere, and a namespace's processes are found by the numbers that its /proc shows.
    for filter in ["comm watch", "netns pid 1"] {
        let lines =
            watch_works(CONTAINER, &format!("--function udp_recvmsg --filter '{filter}' --no-events --traffic udp:3"));
        let ledger = &lines.last().unwrap()["ledger"];
        assert!(ledger.to_string().contains(r#""completed":3"#), "{filter}: {ledger}");
    }
}

/// Events have the host's pids, also of and within pid namespaces: two that are both 1 there aren't mixed up.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn pid_namespaces_and_events() {
    let probe = probe(&["udp_sendmsg"]);
    let send = "bash -c 'echo x >/dev/udp/127.0.0.1/9; exec sleep 60'";
    let start = || Command::new("sh").args(["-c", &format!("exec {CONTAINER} {send}")]).spawn().unwrap();
    let containers = [start(), start()];
    eventually("both have sent", || only(&probe.ledger()).delivered >= 2);
    let mut inside: Vec<u32> = containers
        .map(|mut unshare| {
            let path = format!("/proc/{0}/task/{0}/children", unshare.id());
            let child = fs::read_to_string(path).unwrap().trim().parse().expect("one");
            run(&format!("kill -KILL {child}"));
            unshare.wait().unwrap();
            child
        })
        .to_vec();
    let (events, _) = finish(probe);
    let mut pids: Vec<u32> = events.iter().map(|event| event.pid).collect();
    assert!(events.iter().all(|event| event.tid == event.pid), "{events:?}");
    pids.sort();
    inside.sort();
    assert_eq!(pids, inside, "{events:?}");

    // A probe that is within has them, too.
    let lines = watch_works(CONTAINER, "--function udp_sendmsg --traffic udp:2");
    let events: Vec<_> = lines.iter().filter(|line| line["pid"].is_number()).collect();
    assert_eq!(events.len(), 2, "{lines:?}");
    assert!(events.iter().all(|event| event["pid"].as_u64() > Some(1)), "{lines:?}");
}

/// Type information that is missing, hidden, cut off or something else: said at once, and what it is.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn damaged_btf() {
    let btf = "/sys/kernel/btf/vmlinux";
    let instead = |what: &str| after(&format!("{what} && mount --bind /dev/shm/btf {btf}"));
    for (before, says) in [
        (instead(&format!("head -c 1000000 {btf} >/dev/shm/btf")), "can't be read: it ends within"),
        (instead(&format!("head -c 10 {btf} >/dev/shm/btf")), "can't be read: it ends within"),
        (instead("echo this is no type information >/dev/shm/btf"), "can't be read: its magic number is 0x6874"),
        (instead(": >/dev/shm/btf"), "this kernel offers no type information at"),
        (after(&format!("mount --bind /dev/null {btf}")), "this kernel offers no type information at"),
        (after("mount -t tmpfs none /sys"), "this kernel offers no type information at"),
    ] {
        let text = watch_fails(&before, "--function ip_rcv");
        assert!(text.contains(btf) && text.contains(says), "{text}");
    }
    fs::remove_file("/dev/shm/btf").unwrap();
}

/// What only helps isn't needed: tracefs, /proc, debugfs, a file system that can be written.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn hidden_files() {
    let no_tracefs = after("mount -t tmpfs none /sys/kernel/tracing && mount -t tmpfs none /sys/kernel/debug");
    let no_proc = after("mount -t tmpfs none /proc");
    let read_only = after("mount -o remount,bind,ro / && ! touch /tmp/x 2>/dev/null");
    for before in [&no_tracefs, &no_proc, &read_only] {
        for what in ["--function ip_rcv", "--span tp:net_dev_queue..ip_rcv_core --stack"] {
            let lines = watch_works(before, &format!("{what} --traffic udp:3"));
            assert!(lines.last().unwrap().to_string().contains(r#""delivered":3"#), "{before}: {lines:?}");
        }
    }
    // Without ftrace's list there is what the kernel has answered.
    let text = watch_fails(&no_tracefs, "--function do_syscall_64");
    let reason =
        if kernel_version() < (5, 11) { "the kernel's type information" } else { "the kernel refused it (errno " };
    assert!(text.contains(reason), "{text}");
    let text = watch_fails(&no_proc, "--function no_such_function");
    assert!(text.contains("this kernel has no function `no_such_function`"), "{text}");
    // A filter by what only /proc tells.
    let text = watch_fails(&no_proc, "--function ip_rcv --filter 'pid 7'");
    assert!(text.contains("/proc/self/ns/pid failed"), "{text}");
}

/// With the function tracer switched off the kernel would attach in silence, and nothing would ever come: it is said
/// instead. Tracepoints don't need it. The newest kernels don't let it be switched off.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn function_tracer_off() {
    until_bpf_is_gone();
    let switch = |to| run(&format!("sysctl -w kernel.ftrace_enabled={to}"));
    if !shell("sysctl -w kernel.ftrace_enabled=0").status.success() {
        assert!(kernel_version() > (6, 12), "it could be switched off for long");
        assert_eq!(run("sysctl -n kernel.ftrace_enabled").trim(), "1");
        return drop(probe(&["ip_rcv"]));
    }
    let refused = LatencyProbe::builder().function("ip_rcv").attach().map(drop);
    let span = Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"));
    let packets = LatencyProbe::builder().span(span).attach().map(|probe| {
        ping_pong(&udp_to_itself(), 10, b"x");
        finish(probe).0.len()
    });
    let doctor = shell(&format!("{} --json", example("doctor").display()));
    until_bpf_is_gone();
    switch(1);
    let error: Error = refused.unwrap_err();
    println!("{error}");
    let ErrorKind::NotTraceable { reason, .. } = error.kind() else { panic!("{error}") };
    assert_eq!(*reason, NotTraceable::TracerOff, "{error}");
    assert_eq!(packets.unwrap(), 10);
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let check = &doctor["checks"]["trampolines"];
    assert!(check["answer"] == "no" && check["remedy"].to_string().contains("kernel.ftrace_enabled=1"), "{check}");
    // What was refused then isn't now.
    let probe = probe(&["ip_rcv"]);
    ping_pong(&udp_to_itself(), 10, b"x");
    assert_eq!(finish(probe).0.len(), 10);
}

static SAID: AtomicUsize = AtomicUsize::new(0);

fn say(_: libbpf_rs::PrintLevel, _: String) {
    SAID.fetch_add(1, Ordering::Relaxed);
}

/// The program's own print callback for libbpf stays, and hears nothing of what this crate does with libbpf.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn print_callback() {
    let own: libbpf_rs::PrintCallback = say;
    let before = libbpf_rs::set_print(Some((libbpf_rs::PrintLevel::Debug, own)));
    drop(probe(&["ip_rcv"]));
    for function in ["do_syscall_64", "no_such_function"] {
        LatencyProbe::builder().function(function).attach().unwrap_err();
    }
    let after = libbpf_rs::set_print(before);
    assert!(after.is_some_and(|(_, print)| ptr::fn_addr_eq(print, own)));
    assert_eq!(SAID.load(Ordering::Relaxed), 0);
}

/// Three leading underscores or four mean nothing: the function of just that name is found, and each call is seen.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn leading_underscores() {
    let probe = probe(&["____sys_recvmsg", "___pskb_trim"]);
    let socket = udp_to_itself();
    for _ in 0..100 {
        socket.send(b"x").unwrap();
        let mut buffer = [0; 8];
        recvmsg(&socket, &mut [IoSliceMut::new(&mut buffer)], &mut RecvAncillaryBuffer::default(), RecvFlags::empty())
            .unwrap();
    }
    let (events, ledger) = finish(probe);
    let seen = events.iter().filter(|event| event.span == "____sys_recvmsg").count();
    assert_eq!(seen, 100, "{ledger}");
}

/// One bad function of three leaves the others, if that was asked for, and they deliver.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn best_effort() {
    let wanted = ["udp_recvmsg", "no_such_fn_xyz", "ip_rcv"];
    let builder = wanted.iter().fold(LatencyProbe::builder().best_effort(), |builder, name| builder.function(*name));
    let probe = builder.attach().unwrap();
    let failures: Vec<_> = probe.failures().iter().map(|failure| failure.span.as_str()).collect();
    assert_eq!(failures, ["no_such_fn_xyz"]);
    ping_pong(&udp_to_itself(), 5, b"x");
    let (events, _) = finish(probe);
    for name in ["udp_recvmsg", "ip_rcv"] {
        assert_eq!(events.iter().filter(|event| event.span == name).count(), 5, "{name}");
    }
}
