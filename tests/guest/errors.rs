//! Every kind of error, as a user meets it: quickly, in one line, with nothing left attached.
//!
//! A kernel that refuses tracing altogether is not among the guests; `tests/native.rs` covers it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::process::Output;
use std::time::Instant;

use dwell::{ErrorKind, Hook, LatencyProbe, NotTraceable, Span};

use crate::support::{
    bpf_objects, by_architecture, eventually, example, finish, ms, only, probe, run, shell, until_bpf_is_gone,
};

/// Emulation is some twenty times slower than the machines for which a second is promised.
const SOON: u64 = 15_000;

fn refusal(function: &str) -> ErrorKind {
    until_bpf_is_gone();
    let before = Instant::now();
    let error = LatencyProbe::builder().function("ip_rcv").function(function).attach().expect_err(function);
    let took = before.elapsed();
    println!("{took:?}: {error}");
    assert!(took < ms(SOON), "{function}: {took:?}");
    assert!(error.to_string().contains(function) && !error.to_string().contains('\n'), "{error}");
    assert_eq!(error.hook(), Some(function));
    eventually("nothing is left attached", || bpf_objects() == [0; 3]);
    error.kind().clone()
}

fn reason(function: &str) -> NotTraceable {
    match refusal(function) {
        ErrorKind::NotTraceable { reason, .. } => reason,
        other => panic!("{function}: {other:?}"),
    }
}

/// A misspelt name is met with the right one.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn unknown_functions() {
    for (wrong, right) in [("ip_rvc", "ip_rcv"), ("tcp_v4_rvc", "tcp_v4_rcv"), ("upd_sendmsg", "udp_sendmsg")] {
        match refusal(wrong) {
            ErrorKind::UnknownFunction { near, .. } => assert!(near.contains(&right.to_owned()), "{near:?}"),
            other => panic!("{other:?}"),
        }
    }
    match refusal("zzz_no_such_thing_at_all") {
        ErrorKind::UnknownFunction { near, .. } => assert!(near.is_empty(), "{near:?}"),
        other => panic!("{other:?}"),
    }
}

/// A function of which the compiler left only copies with other names.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn optimised_variants() {
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap();
    let code = || {
        symbols.lines().filter(|line| !line.contains('[')).filter_map(|line| {
            let mut words = line.split_whitespace().skip(1);
            Some((matches!(words.next()?, "t" | "T"), words.next()?))
        })
    };
    let plain: HashSet<_> = code().map(|(_, name)| name).collect();
    // Of these each kernel has many; which ones differs from build to build. What only pads a function has its name, too.
    let candidates =
        code().filter(|(is_code, name)| *is_code && !name.starts_with("__pfx_")).filter_map(|(_, name)| {
            let (function, _) = name.split_once(".constprop.").or_else(|| name.split_once(".isra."))?;
            (!function.contains('.') && !plain.contains(function)).then_some((function, name))
        });
    let mut tried = 0;
    for (function, variant) in candidates.take(3) {
        match reason(function) {
            NotTraceable::OptimisedVariant { symbols, .. } => {
                assert!(symbols.iter().any(|symbol| symbol == variant), "{variant} is not in {symbols:?}");
            }
            NotTraceable::ProbePath => continue,
            other => panic!("{function}: {other}"),
        }
        tried += 1;
    }
    assert!(tried > 0, "this kernel has no such function");
}

/// A function that has code and types, and that the kernel keeps from being traced.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn excluded_functions() {
    // The entry of system calls, which the kernel keeps free of any instrumentation.
    let function = by_architecture("do_syscall_64", "el0t_64_sync_handler");
    assert_eq!(reason(function), NotTraceable::Excluded);
}

/// A module that isn't loaded is named, whether or not the user named it; loading it helps, where it has types.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn modules_not_loaded() {
    for function in ["vxlan_fdb_find_uc", "vxlan:vxlan_fdb_find_uc", "vxlan:whatever"] {
        match reason(function) {
            NotTraceable::ModuleNotLoaded { module, .. } => assert_eq!(module, "vxlan", "{function}"),
            other => panic!("{function}: {other}"),
        }
    }
    run("modprobe vxlan");
    if crate::support::kernel_version() < (5, 11) {
        match reason("vxlan_fdb_find_uc") {
            NotTraceable::ModuleWithoutBtf { module, .. } => assert_eq!(module, "vxlan"),
            other => panic!("{other}"),
        }
        return;
    }
    drop(probe(&["vxlan_fdb_find_uc"]));
    drop(probe(&["vxlan:vxlan_fdb_find_uc"]));
    assert_eq!(reason("vxlan:vxlan_init_module"), NotTraceable::Inlined, "it has run and is gone");
    match refusal("vxlan:vxlan_fdb_find_cu") {
        ErrorKind::UnknownFunction { near, .. } => assert!(near.contains(&"vxlan_fdb_find_uc".to_owned()), "{near:?}"),
        other => panic!("{other:?}"),
    }
}

/// Modules that are part of the kernel, and modules that there aren't.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_such_modules() {
    match reason("tcp-cubic:cubictcp_init") {
        NotTraceable::ModuleBuiltIn { module, .. } => assert_eq!(module, "tcp_cubic"),
        other => panic!("{other}"),
    }
    for (wrong, right) in [("nf_table:nft_do_chain", "nf_tables"), ("vlxan:vxlan_xmit", "vxlan")] {
        match refusal(wrong) {
            ErrorKind::UnknownModule { near, .. } => assert!(near.contains(&right.to_owned()), "{near:?}"),
            other => panic!("{other:?}"),
        }
    }
    match refusal("no_such_module_at_all:ip_rcv") {
        ErrorKind::UnknownModule { module, .. } => assert_eq!(module, "no_such_module_at_all"),
        other => panic!("{other:?}"),
    }
}

/// System calls, which Linux 6.1's type information has twice each, are one function all the same.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn described_twice() {
    if crate::support::kernel_version() < (5, 11) {
        println!("this kernel doesn't let programs read what is only declared, as these arguments are");
        return;
    }
    let probe = probe(&[by_architecture("__x64_sys_listen", "__arm64_sys_listen")]);
    drop(std::net::TcpListener::bind("127.0.0.1:0").expect("a free port"));
    let (_, ledger) = finish(probe);
    assert_eq!(only(&ledger).started, 1);
}

/// What never returns has no latency; what the probe itself runs through would never end.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn refused_by_name() {
    assert_eq!(reason("do_exit"), NotTraceable::NeverReturns);
    assert_eq!(reason("bpf_ringbuf_reserve"), NotTraceable::ProbePath);
}

/// A name that the kernel has several times is refused: it would attach to any of them.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn names_that_several_functions_have() {
    let symbols = fs::read_to_string("/proc/kallsyms").unwrap();
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for line in symbols.lines().filter(|line| !line.contains('[')) {
        let mut words = line.split_whitespace().skip(1);
        if let (Some("t" | "T"), Some(name)) = (words.next(), words.next()) {
            *counts.entry(name).or_default() += 1;
        }
    }
    // What pads the functions isn't one.
    let is_one = |name: &str| !name.contains('.') && !name.starts_with("__pfx_");
    let mut several: Vec<_> = counts.into_iter().filter(|(name, count)| *count > 1 && is_one(name)).collect();
    several.sort();
    assert!(several.len() > 4, "{several:?}");
    for (name, count) in several.into_iter().step_by(50).take(4) {
        match reason(name) {
            // Of their symbols, or of their descriptions.
            NotTraceable::Indistinct { copies, .. } => {
                assert!((2..=count).contains(&copies), "{name}: {copies} of {count}")
            }
            // Copies that differ aren't described at all.
            NotTraceable::Untyped | NotTraceable::Excluded | NotTraceable::ProbePath => {}
            other => panic!("{name}: {other}"),
        }
    }
}

/// A function that has no packet says what it has.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_such_argument() {
    let span = Span::between(Hook::entry("ip_list_rcv"), Hook::entry("ip_rcv_core"));
    let error = LatencyProbe::builder().span(span).attach().unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("`ip_list_rcv` has no argument that is a packet (struct sk_buff *)"), "{text}");
    assert!(text.contains("struct list_head *head"), "{text}");
    assert_eq!(error.hook(), Some("ip_list_rcv"));
}

/// One bad function among good ones takes nothing with it, and leaves nothing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn one_bad_function() {
    let builder = LatencyProbe::builder().function("tcp_recvmsg").function("no_such_fn_xyz").function("ip_rcv");
    let error = builder.attach().expect_err("one is unknown");
    assert_eq!(error.hook(), Some("no_such_fn_xyz"));
}

/// Runs `watch` through a shell; its status must be 2, and its one line must be all that it says.
#[track_caller]
fn watch_fails(before: &str, function: &str) -> String {
    let watch = example("watch");
    let started = Instant::now();
    let Output { status, stdout, stderr } =
        shell(&format!("{before} {} --json --function {function}", watch.display()));
    assert!(started.elapsed() < ms(2 * SOON), "it took {:?}", started.elapsed());
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2), "{stderr}");
    assert!(stdout.is_empty(), "{}", String::from_utf8_lossy(&stdout));
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr
}

/// Without capabilities the missing ones are named.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_privilege() {
    let nobody = "setpriv --reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --inh-caps=-all";
    let text = watch_fails(nobody, "ip_rcv");
    assert!(text.contains("CAP_BPF and CAP_PERFMON"), "{text}");

    let half = "setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all,+bpf --ambient-caps=+bpf";
    let text = watch_fails(half, "ip_rcv");
    assert!(text.contains("CAP_PERFMON") && !text.contains("CAP_BPF"), "{text}");
}

/// Root of a user namespace has every capability, and none that counts.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn rootless() {
    let text = watch_fails("unshare --user --map-root-user", "ip_rcv");
    assert!(text.contains("outside its user namespace"), "{text}");
}

/// CAP_BPF and CAP_PERFMON are enough. Before 5.11, where maps count as locked memory, the limit on that must allow it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn two_capabilities_are_enough() {
    let caps =
        "setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all,+bpf,+perfmon --ambient-caps=+bpf,+perfmon";
    let watch = example("watch");
    let command = format!("{caps} {} --json --function ip_rcv --traffic udp:3", watch.display());
    if crate::support::kernel_version() < (5, 11) {
        let text = watch_fails(&format!("ulimit -l 64; {caps}"), "ip_rcv");
        assert!(text.contains("CAP_SYS_RESOURCE"), "{text}");
        run(&format!("ulimit -l unlimited; {command}"));
    } else {
        run(&format!("ulimit -l 64; {command}"));
    }
}

/// A kernel, or a container, without type information.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_btf() {
    let hide = "unshare -m sh -c 'mount -t tmpfs none /sys/kernel/btf && exec \"$@\"' sh";
    let text = watch_fails(hide, "ip_rcv");
    assert!(text.contains("no type information at /sys/kernel/btf/vmlinux"), "{text}");
}

/// No descriptors left: an error of the system, not of the function.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_descriptors() {
    for limit in [4, 8, 12] {
        let watch = example("watch");
        let output = shell(&format!("ulimit -n {limit}; {} --json --function ip_rcv --traffic udp:1", watch.display()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!stderr.contains("panicked"), "{limit}: {stderr}");
        match output.status.code() {
            Some(0) => break,
            Some(2) => assert!(stderr.lines().count() == 1, "{limit}: {stderr}"),
            other => panic!("{limit}: {other:?} {stderr}"),
        }
    }
}
