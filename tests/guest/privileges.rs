//! What each feature needs of privileges, and that exactly what is missing is named.
//!
//! The features are tried by this same program, started again as an ordinary user with few capabilities.

use std::os::unix::process::parent_id;
use std::process::Output;

use dwell::{
    Capability, Error, ErrorKind, Events, Filter, GroupBy, Hook, Key, LatencyEvent, LatencyProbe, LatencyProbeBuilder,
    NotTraceable, ProgramStatistics, Span, Stage,
};
use rustix::fs::{XattrFlags, setxattr};

use crate::support::{example, finish, gettid, kernel_version, ping_pong, run, shell, udp_to_itself};

/// What is needed, but for what is needed by everything.
#[derive(Clone, Copy, PartialEq)]
enum Needs {
    /// `CAP_BPF` and `CAP_PERFMON`.
    Tracing,
    /// These, and the types of modules.
    Module,
    /// These, and to look at a process of another user.
    Process,
    /// These; and to see the addresses of symbols, without which it works half.
    Symbols,
    /// Only `CAP_SYS_ADMIN`.
    Admin,
}

type Feature = (&'static str, Needs, fn() -> Result<String, Error>);

/// All that the crate offers, as far as the kernel is asked for it.
const FEATURES: &[Feature] = &[
    ("calls", Needs::Tracing, || datagram(LatencyProbe::builder().function("ip_rcv"))),
    ("calls by frames", Needs::Tracing, || datagram(LatencyProbe::builder().function("ip_rcv").frames())),
    ("spans by each key", Needs::Tracing, spans),
    ("plain tracepoints", Needs::Tracing, || datagram(LatencyProbe::builder().span(wire()).plain_tracepoints())),
    ("a stage", Needs::Tracing, || datagram(LatencyProbe::builder().stage(Stage::SocketQueue))),
    ("filters", Needs::Tracing, filters),
    #[cfg(feature = "pcap")]
    ("pcap", Needs::Tracing, || {
        datagram(LatencyProbe::builder().function("ip_rcv").filter(Filter::pcap("udp and not port 1")?))
    }),
    ("identify, slowest, groups", Needs::Tracing, records),
    ("an empty call", Needs::Tracing, || LatencyProbe::empty_call().map(|calls| worked(!calls.is_empty()))),
    ("stories", Needs::Symbols, stories),
    ("a function of a module", Needs::Module, || {
        drop(LatencyProbe::builder().function("dummy:dummy_xmit").attach()?);
        Ok(worked(true))
    }),
    ("netns of a process", Needs::Process, || {
        datagram(LatencyProbe::builder().function("ip_rcv").filter(Filter::netns_of_pid(parent_id())))
    }),
    ("statistics", Needs::Admin, || ProgramStatistics::enable().map(|_| worked(true))),
];

fn worked(it_did: bool) -> String {
    if it_did { "works" } else { "NOTHING CAME" }.to_owned()
}

fn events(builder: LatencyProbeBuilder) -> Result<Vec<LatencyEvent>, Error> {
    let probe = builder.ring_bytes(64 << 10).attach()?;
    ping_pong(&udp_to_itself(), 1, b"x");
    Ok(finish(probe).0)
}

fn datagram(builder: LatencyProbeBuilder) -> Result<String, Error> {
    Ok(worked(!events(builder)?.is_empty()))
}

fn wire() -> Span {
    Span::between(Hook::tracepoint("net_dev_queue"), Hook::tracepoint("netif_receive_skb"))
}

/// Typed tracepoints, entries and exits of functions.
fn spans() -> Result<String, Error> {
    let sent = || Span::between(Hook::entry("udp_sendmsg"), Hook::exit("udp_recvmsg"));
    let spans = [
        wire().keyed_by(Key::Skb),
        wire().keyed_by(Key::SkbHead),
        sent().keyed_by(Key::Sock),
        sent().keyed_by(Key::Thread),
        wire().keyed_by(Key::Flow),
        wire().keyed_by(Key::FlowReply),
    ];
    let builder = LatencyProbe::builder();
    let named = spans.into_iter().enumerate().map(|(n, span)| span.named(format!("{n}")));
    let found = events(named.fold(builder, LatencyProbeBuilder::span))?;
    // Nobody replies to it.
    Ok(worked((0..5).all(|n| found.iter().any(|event| event.span == *n.to_string()))))
}

fn filters() -> Result<String, Error> {
    let text = format!(
        "udp and host 127.0.0.1 and netns /proc/self/ns/net and pid {} and tid {} and cgroup /",
        std::process::id(),
        gettid()
    );
    datagram(LatencyProbe::builder().function("udp_sendmsg").filter(text.parse::<Filter>()?))
}

fn records() -> Result<String, Error> {
    let span = Span::function("ip_rcv").grouped_by(GroupBy::Interface);
    let builder = LatencyProbe::builder().span(span).identify().keep_slowest(3);
    let probe = builder.ring_bytes(64 << 10).events(Events::None).attach()?;
    ping_pong(&udp_to_itself(), 1, b"x");
    let slowest = probe.slowest("ip_rcv")?.events;
    let identified = slowest.iter().any(|event| event.identity.is_some());
    Ok(worked(identified && !probe.groups("ip_rcv")?.groups.is_empty()))
}

/// Whether it has names, too.
fn stories() -> Result<String, Error> {
    let found = events(LatencyProbe::builder().function("udp_sendmsg").stories())?;
    let Some(story) = found.first().and_then(|event| event.story.as_ref()) else { return Ok(worked(false)) };
    let named = story.stack.frames().iter().any(|frame| frame.symbol.is_some());
    assert!(!story.stack.frames().is_empty());
    Ok(if named { "names" } else { "addresses" }.to_owned())
}

/// The outcome in a few words.
fn told(result: Result<String, Error>) -> String {
    let error = match result {
        Ok(text) => return text,
        Err(error) => error,
    };
    assert!(!error.to_string().contains('\n'), "{error}");
    match error.kind() {
        ErrorKind::NoPrivilege { missing, user_namespace: false, .. } => {
            let missing: Vec<_> = missing.iter().map(Capability::to_string).collect();
            assert!(missing.iter().all(|name| error.to_string().contains(name)), "{error}");
            format!("lacks {}", missing.join(" "))
        }
        ErrorKind::LockedMemory { limit, .. } => {
            assert!(error.to_string().contains("RLIMIT_MEMLOCK") && error.to_string().contains("ulimit -l"), "{error}");
            format!("limit {limit}")
        }
        ErrorKind::NotTraceable { reason: NotTraceable::ModuleWithoutBtf { .. }, .. } => "no types".to_owned(),
        _ => error.to_string(),
    }
}

/// What a feature comes to, on this kernel, with these capabilities and limit.
fn expected(needs: Needs, capabilities: &[&str], unlimited: bool) -> String {
    let has = |name| capabilities.contains(&name);
    let mut lacks = Vec::new();
    if needs != Needs::Admin && !has("sys_admin") {
        lacks.extend((!has("bpf")).then_some("CAP_BPF"));
        lacks.extend((!has("perfmon")).then_some("CAP_PERFMON"));
    }
    let old = kernel_version() < (5, 11);
    if lacks.is_empty() {
        match needs {
            Needs::Module if old => return "no types".to_owned(),
            Needs::Process if !has("sys_ptrace") => lacks.push("CAP_SYS_PTRACE"),
            Needs::Admin if !has("sys_admin") => lacks.push("CAP_SYS_ADMIN"),
            _ => {}
        }
    }
    if lacks.is_empty() && old && !unlimited && !has("sys_resource") && needs != Needs::Admin {
        return "limit 65536".to_owned();
    }
    if lacks.is_empty() && needs == Needs::Module && !has("sys_admin") {
        lacks.push("CAP_SYS_ADMIN");
    }
    match needs {
        _ if !lacks.is_empty() => format!("lacks {}", lacks.join(" ")),
        Needs::Symbols if !has("syslog") => "addresses".to_owned(),
        Needs::Symbols => "names".to_owned(),
        _ => "works".to_owned(),
    }
}

const ROWS: &str = "DWELL_PRIVILEGES_ROWS";
const ROOT: [&str; 7] = ["bpf", "perfmon", "sys_admin", "sys_ptrace", "syslog", "sys_resource", "net_admin"];

fn locked_memory() -> String {
    let limits = std::fs::read_to_string("/proc/self/limits").expect("/proc is mounted");
    limits.lines().find(|line| line.starts_with("Max locked memory")).expect("there is one").to_owned()
}

/// Root has all that it takes, and, where maps don't count as locked memory, the limit on that is left as it is.
///
/// Started again by the other test, it tries what that wants to know, and says what came of it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn features() {
    let before = locked_memory();
    let wanted = std::env::var(ROWS);
    if wanted.is_err() {
        run("modprobe dummy");
    }
    for (name, needs, attempt) in FEATURES {
        match &wanted {
            Ok(rows) if rows.split(';').any(|row| row == *name) => println!("\nrow\t{name}\t{}", told(attempt())),
            Ok(_) => {}
            // The others are what all other tests are about.
            Err(_) if *needs == Needs::Tracing => {}
            Err(_) => assert_eq!(told(attempt()), expected(*needs, &ROOT, true), "{name}"),
        }
    }
    if kernel_version() >= (5, 11) {
        assert_eq!(locked_memory(), before);
    }
}

/// Runs a command as an ordinary user with these capabilities, and no others within reach.
fn as_user(before: &str, capabilities: &[&str], command: &str) -> Output {
    let set = capabilities.iter().fold("-all".to_owned(), |set, name| set + ",+" + name);
    let user = "setpriv --reuid=1000 --regid=1000 --clear-groups";
    shell(&format!("{before} exec {user} --bounding-set={set} --inh-caps={set} --ambient-caps={set} {command}"))
}

/// Which features work with which capabilities; and where one doesn't, exactly what is missing is named. libbpf prints
/// nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn matrix() {
    run("modprobe dummy");
    let all: Vec<_> = FEATURES.iter().map(|feature| feature.0).collect();
    let special: Vec<_> = FEATURES.iter().filter(|(_, needs, _)| *needs != Needs::Tracing).map(|row| row.0).collect();
    let two = ["bpf", "perfmon"];
    let with = |one| [two[0], two[1], one];
    let mut columns: Vec<(Vec<&str>, bool, &[&str])> = vec![
        (vec![], true, &all),
        (vec!["bpf"], true, &all),
        (vec!["perfmon"], true, &all),
        (two.to_vec(), true, &all),
        // It stands for both.
        (vec!["sys_admin"], true, &special),
        (with("sys_admin").to_vec(), true, &special),
        (with("syslog").to_vec(), true, &["stories"]),
        (with("sys_ptrace").to_vec(), true, &["netns of a process"]),
        (two.to_vec(), false, &["calls", "spans by each key", "stories", "statistics"]),
    ];
    if kernel_version() < (5, 11) {
        columns.push((with("sys_resource").to_vec(), false, &["calls", "spans by each key"]));
    }
    let this = std::env::current_exe().unwrap();
    for (capabilities, unlimited, rows) in columns {
        let limit = if unlimited { "unlimited" } else { "64" };
        let command =
            format!("{} --exact privileges::features --include-ignored --nocapture --test-threads=1", this.display());
        let before = format!("ulimit -l {limit}; {ROWS}='{}'; export {ROWS};", rows.join(";"));
        let Output { status, stdout, stderr } = as_user(&before, &capabilities, &command);
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success() && stderr.is_empty(), "{capabilities:?}: {stdout} {stderr}");
        let found: Vec<_> = stdout.lines().filter_map(|line| line.strip_prefix("row\t")).collect();
        assert_eq!(found.len(), rows.len(), "{stdout}");
        let wanted = FEATURES.iter().filter(|(name, ..)| rows.contains(name));
        let wanted: Vec<_> =
            wanted.map(|(name, needs, _)| format!("{name}\t{}", expected(*needs, &capabilities, unlimited))).collect();
        assert_eq!(found, wanted, "with {capabilities:?}, locked memory {limit}");
    }
}

/// Names in stacks need no capability where the kernel shows its addresses to everybody.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn addresses_that_everybody_sees() {
    let names = |restrict: u8, paranoid: i8| {
        run(&format!("sysctl -w kernel.kptr_restrict={restrict} kernel.perf_event_paranoid={paranoid}"));
        let command =
            format!("{} --json --function udp_sendmsg --stack --count 1 --traffic udp:1", example("watch").display());
        let output = as_user("ulimit -l unlimited;", &["bpf", "perfmon"], &command);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().contains("udp_sendmsg+")
    };
    let before = ["kptr_restrict", "perf_event_paranoid"].map(|name| run(&format!("sysctl -n kernel.{name}")));
    let found = [names(0, 1), names(0, 2), names(1, 1)];
    run(&format!(
        "sysctl -w kernel.kptr_restrict={} kernel.perf_event_paranoid={}",
        before[0].trim(),
        before[1].trim()
    ));
    assert_eq!(found, [true, false, false]);
}

/// A program that was given the two capabilities by `setcap` is all that an ordinary user needs.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn capabilities_of_a_file() {
    let copy = "/dev/shm/watch";
    std::fs::copy(example("watch"), copy).unwrap();
    // `struct vfs_cap_data`: version 2 and `effective`, then the lower and the upper halves of two sets.
    let upper: u32 = 1 << (38 - 32) | 1 << (39 - 32);
    let words = [0x0200_0001, 0, 0, upper, 0].map(u32::to_le_bytes);
    setxattr(copy, "security.capability", &words.concat(), XattrFlags::empty()).unwrap();
    let command = format!("{copy} --json --function ip_rcv --traffic udp:3");
    let user = "exec setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all";
    let output = shell(&format!("ulimit -l unlimited; {user} {command}"));
    std::fs::remove_file(copy).unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout} {}", String::from_utf8_lossy(&output.stderr));
    assert!(stdout.contains(r#""delivered":3"#), "{stdout}");
}

/// Where ftrace's list can't be read, as by an ordinary user, a function that the kernel excludes is refused all the same;
/// 5.10 doesn't describe this one.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn excluded_functions() {
    let command = format!("{} --json --function do_syscall_64", example("watch").display());
    let output = as_user("ulimit -l unlimited;", &["bpf", "perfmon"], &command);
    let stderr = String::from_utf8(output.stderr).unwrap();
    println!("{stderr}");
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    let reason =
        if kernel_version() < (5, 11) { "the kernel's type information" } else { "the kernel refused it (errno " };
    assert!(stderr.contains(&format!("`do_syscall_64` can't be traced: {reason}")), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}
