//! The support report, on kernels of which it is known what they can do, and its example as scripts use it.

use std::collections::HashSet;
use std::time::Instant;

use dwell::{LatencyProbe, Support};
use libbpf_rs::query::{LinkInfoIter, MapInfoIter, ProgInfoIter};
use serde_json::Value;

use crate::support::{eventually, example, has_trampolines, kernel_version, ms, run, shell};

const NOBODY: &str = "setpriv --reuid=1000 --regid=1000 --clear-groups --bounding-set=-all --inh-caps=-all";
const TWO_CAPABILITIES: &str =
    "setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all,+bpf,+perfmon --ambient-caps=+bpf,+perfmon";

/// What `doctor` says, after a shell's words that change what it may do, and its status.
#[track_caller]
fn doctor(before: &str) -> (Value, i32) {
    let command = format!("{before} {}", example("doctor").display());
    let (text, json) = (shell(&command), shell(&format!("{command} --json")));
    for output in [&text, &json] {
        assert!(output.stderr.is_empty(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(text.status, json.status);
    let text = String::from_utf8(text.stdout).unwrap();
    println!("{text}");
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_agree(&text, &report);
    (report, json.status.code().unwrap())
}

/// Both forms say the same.
#[track_caller]
fn assert_agree(text: &str, report: &Value) {
    let expected =
        format!("Linux {}, {}", report["kernel"].as_str().unwrap(), report["architecture"].as_str().unwrap());
    assert_eq!(text.lines().next(), Some(&*expected));
    let yes_no = |yes: &Value| if yes.as_bool().unwrap() { "yes" } else { "no" };
    assert!(text.contains(&format!("\nFunctions can be traced: {}\n", yes_no(&report["functions"]))), "{text}");
    assert!(text.contains(&format!("\nPackets can be followed: {}\n", yes_no(&report["packets"]))), "{text}");
    for (name, check) in report["checks"].as_object().unwrap() {
        let (answer, cause) = (check["answer"].as_str().unwrap(), check["cause"].as_str().unwrap());
        let starts_with_both = |line: &str| line.split_whitespace().take(2).eq([name.as_str(), answer]);
        assert!(text.lines().any(|line| starts_with_both(line) && line.ends_with(cause)), "{name}: {check}");
        assert!(!cause.is_empty(), "{name}");
        if let Some(remedy) = check["remedy"].as_str() {
            assert_eq!(text.matches(remedy).count(), 1, "{name}: {remedy}");
        }
    }
}

#[track_caller]
fn answers(report: &Value, names: &[&str], answer: &str) {
    for name in names {
        assert_eq!(report["checks"][name]["answer"], answer, "{name}: {}", report["checks"][name]);
    }
}

#[track_caller]
fn says(report: &Value, name: &str, part: &str, text: &str) {
    let check = &report["checks"][name];
    assert!(check[part].as_str().is_some_and(|said| said.contains(text)), "{name}: {check}");
}

/// What each kernel is known to have.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn each_kernel() {
    // So that there is a module to ask for.
    run("modprobe veth");
    let (report, status) = doctor("");
    let functions = has_trampolines();
    let expected = (if functions { 0 } else { 1 }, functions.into(), true.into());
    assert_eq!((status, &report["functions"], &report["packets"]), (expected.0, &expected.1, &expected.2));
    assert_eq!(report["kernel"].as_str(), Some(run("uname -r").trim()));
    assert_eq!(report["architecture"], std::env::consts::ARCH);
    let everywhere = [
        "btf",
        "raw_tracepoints",
        "typed_tracepoints",
        "ring_buffer",
        "cap_bpf",
        "cap_perfmon",
        "cap_sys_admin",
        "cap_sys_resource",
        "initial_user_namespace",
    ];
    answers(&report, &everywhere, "yes");
    let from = |since| if kernel_version() >= since { "yes" } else { "no" };
    answers(&report, &["trampolines"], if functions { "yes" } else { "no" });
    answers(&report, &["module_btf"], from((5, 11)));
    answers(&report, &["atomic_table"], from((5, 12)));
    answers(&report, &["sessions"], from((7, 0)));
    answers(&report, &["lockdown"], "no");
    for (name, check) in report["checks"].as_object().unwrap() {
        let has_remedy = ["trampolines", "module_btf"].contains(&name.as_str()) && check["answer"] == "no";
        assert_eq!(check["remedy"].is_string(), has_remedy, "{name}: {check}");
    }
    if functions {
        LatencyProbe::builder().function("ip_rcv").attach().expect("it was said to work").stop();
    } else {
        says(&report, "trampolines", "cause", "attaching an fentry program failed (errno 524)");
        says(&report, "trampolines", "cause", "this kernel has no BPF trampolines on this architecture");
        says(&report, "trampolines", "remedy", "on arm64 6.4 or later");
    }

    // The library's report and the example's are one.
    let support = Support::probe();
    assert_eq!(report["checks"].as_object().unwrap().len(), support.checks().len());
    for check in support.checks() {
        let said = &report["checks"][check.feature.name()];
        assert_eq!(said["answer"], check.answer.as_str(), "{said}");
        assert_eq!(said["cause"], check.cause, "{said}");
        assert_eq!(said["remedy"].as_str(), check.remedy.as_deref(), "{said}");
    }
}

/// Nothing stays loaded or attached, a second report is like the first, and neither takes long.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn leaves_nothing() {
    let held = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    // Some of an earlier test may still be on its way out, so it isn't enough to count them.
    let programs = || ProgInfoIter::default().map(|program| program.id).collect::<HashSet<_>>();
    let maps = || MapInfoIter::default().map(|map| map.id).collect::<HashSet<_>>();
    let links = || LinkInfoIter::default().map(|link| link.id).collect::<HashSet<_>>();
    let before = [programs(), maps(), links()];
    let descriptors = held();
    let started = Instant::now();
    let first = Support::probe();
    let took = started.elapsed();
    println!("{took:?}");
    // Emulation is some twenty times slower than the machines for which a second is promised.
    assert!(took < ms(10_000), "{took:?}");
    assert_eq!(Support::probe(), first);
    assert_eq!(held(), descriptors);
    eventually("nothing is left in the kernel", || {
        [programs(), maps(), links()].iter().zip(&before).all(|(after, before)| after.is_subset(before))
    });
}

/// Reports while functions are traced and other reports are made: the trials are in nobody's way.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn beside_others() {
    let probe = crate::support::probe(&["ip_rcv"]);
    let reports: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(Support::probe)).collect();
        crate::support::ping_pong(&crate::support::udp_to_itself(), 100, b"x");
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for report in reports {
        assert!(report.can_trace_functions() && report.can_trace_packets(), "{report}");
    }
    let (events, _) = crate::support::finish(probe);
    assert!(events.len() >= 100, "{}", events.len());
}

/// Without capabilities nothing can be traced, and the report says which are missing.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_privilege() {
    let (report, status) = doctor(NOBODY);
    assert_eq!((status, &report["functions"], &report["packets"]), (2, &false.into(), &false.into()));
    answers(&report, &["trampolines", "raw_tracepoints", "ring_buffer", "cap_bpf", "cap_perfmon"], "no");
    answers(&report, &["btf", "initial_user_namespace"], "yes");
    says(&report, "trampolines", "cause", "CAP_BPF and CAP_PERFMON");
    says(&report, "trampolines", "remedy", "setcap");

    let half = "setpriv --reuid=1000 --regid=1000 --clear-groups --inh-caps=-all,+bpf --ambient-caps=+bpf";
    let (report, _) = doctor(&format!("ulimit -l unlimited; {half}"));
    answers(&report, &["cap_bpf", "ring_buffer"], "yes");
    answers(&report, &["trampolines", "raw_tracepoints", "cap_perfmon"], "no");
    says(&report, "trampolines", "cause", "lacks CAP_PERFMON");
}

/// Two capabilities are enough. Before 5.11, where maps count as locked memory, the limit on that must allow it.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn two_capabilities() {
    let (report, status) = doctor(&format!("ulimit -l unlimited; {TWO_CAPABILITIES}"));
    assert_eq!(status, 0);
    answers(&report, &["trampolines", "raw_tracepoints", "ring_buffer"], "yes");
    answers(&report, &["cap_sys_admin", "cap_sys_resource"], "no");

    let (report, status) = doctor(&format!("ulimit -l 64; {TWO_CAPABILITIES}"));
    if kernel_version() < (5, 11) {
        assert_eq!(status, 2);
        says(&report, "ring_buffer", "cause", "locked memory");
        for name in ["ring_buffer", "cap_sys_resource"] {
            says(&report, name, "remedy", "ulimit -l");
        }
    } else {
        assert_eq!(status, 0);
        assert!(report["checks"]["cap_sys_resource"]["remedy"].is_null(), "{report}");
    }
}

/// Root of a user namespace has every capability, and none that counts.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn rootless() {
    let (report, status) = doctor("unshare --user --map-root-user");
    assert_eq!(status, 2);
    answers(&report, &["trampolines", "raw_tracepoints", "ring_buffer", "cap_bpf", "initial_user_namespace"], "no");
    for name in ["trampolines", "cap_bpf", "initial_user_namespace"] {
        says(&report, name, "remedy", "outside its user namespace");
    }
}

/// A kernel, or a container, without type information: packets can be followed without.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_btf() {
    let (report, status) = doctor("unshare -m sh -c 'mount -t tmpfs none /sys/kernel/btf && exec \"$@\"' sh");
    assert_eq!((status, &report["functions"], &report["packets"]), (2, &false.into(), &false.into()));
    answers(&report, &["btf", "module_btf", "trampolines"], "no");
    answers(&report, &["raw_tracepoints", "ring_buffer"], "yes");
    says(&report, "trampolines", "remedy", "CONFIG_DEBUG_INFO_BTF");
}

/// Without /proc and /sys a trial still is one; what only they tell is unknown.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_proc_no_sys() {
    let hide = "unshare -m sh -c 'mount -t tmpfs none /sys && mount -t tmpfs none /proc && exec \"$@\"' sh";
    let (report, status) = doctor(hide);
    assert_eq!(status, 2);
    answers(&report, &["cap_bpf", "initial_user_namespace", "lockdown"], "unknown");
    answers(&report, &["raw_tracepoints", "ring_buffer"], "yes");
    answers(&report, &["trampolines"], "no");
}

/// No descriptors left: nothing is known, and nothing panics.
#[test]
#[ignore = "needs a kernel that allows fentry: scripts/test runs it in guests"]
fn no_descriptors() {
    for limit in [4, 6, 8] {
        let output = shell(&format!("ulimit -n {limit}; {} --json", example("doctor").display()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.is_empty() && output.status.code().is_some(), "{limit}: {:?} {stderr}", output.status);
    }
}
