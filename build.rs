//! Compiles the eBPF sources below `src/bpf` into skeletons in `OUT_DIR`.

use std::env;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, exit};

use libbpf_cargo::SkeletonBuilder;

const OBJECTS: [&str; 5] = ["call", "hook", "session", "features", "feature_session"];
const HEADERS: [&str; 16] = [
    "dwell.h",
    "kernel.h",
    "args.bpf.h",
    "call.bpf.h",
    "filter.bpf.h",
    "flow.bpf.h",
    "frame.bpf.h",
    "group.bpf.h",
    "histogram.bpf.h",
    "inflight.bpf.h",
    "packet.bpf.h",
    "pcap.bpf.h",
    "ring.bpf.h",
    "shared.bpf.h",
    "slowest.bpf.h",
    "story.bpf.h",
];
const OLDEST_CLANG: u32 = 14;

fn main() {
    println!("cargo:rustc-check-cfg=cfg(dwell_docs, fuzzing)");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=DOCS_RS");
    println!("cargo:rerun-if-env-changed=CLANG");
    println!("cargo:rerun-if-env-changed=DWELL_WERROR");
    for header in HEADERS {
        println!("cargo:rerun-if-changed=src/bpf/{header}");
    }
    for object in OBJECTS {
        println!("cargo:rerun-if-changed=src/bpf/{object}.bpf.c");
    }
    // Documentation is built where there may be no clang; it needs no object code.
    if env::var_os("DOCS_RS").is_some() {
        println!("cargo:rustc-cfg=dwell_docs");
        return;
    }

    let clang = env::var_os("CLANG").unwrap_or_else(|| "clang".into());
    check_clang(&clang);
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // v3 has the atomic and the 32-bit instructions; Linux 5.10 knows all of it but compare-and-swap, which has
    // programs of its own.
    // Structs are also hashed by words.
    let mut arguments = vec!["-mcpu=v3", "-Wall", "-Wextra", "-fno-strict-aliasing"];
    // A warning that a future clang invents must not break anybody's build; the tests set this.
    if env::var_os("DWELL_WERROR").is_some() {
        arguments.push("-Werror");
    }
    for object in OBJECTS {
        let built = SkeletonBuilder::new()
            .source(format!("src/bpf/{object}.bpf.c"))
            .clang(&clang)
            .clang_args(&arguments)
            .build_and_generate(out.join(format!("{object}.skel.rs")));
        if let Err(error) = built {
            fail(&format!("cannot build src/bpf/{object}.bpf.c: {error:#}"));
        }
    }
}

/// Ends the build with a remedy, rather than with a compiler's riddle, where clang is missing or too old.
fn check_clang(clang: &OsStr) {
    let name = clang.to_string_lossy();
    let remedy = "install it (Debian, Ubuntu: apt install clang; Fedora: dnf install clang), \
                  or name one in the CLANG environment variable";
    let Ok(output) = Command::new(clang).arg("-dumpversion").output() else {
        fail(&format!(
            "dwell compiles eBPF programs and needs clang {OLDEST_CLANG} or newer, but `{name}` can't be run: {remedy}"
        ));
    };
    let version = String::from_utf8_lossy(&output.stdout);
    let major = version.trim().split('.').next().and_then(|major| major.parse::<u32>().ok());
    if major.is_some_and(|major| major < OLDEST_CLANG) {
        fail(&format!("dwell needs clang {OLDEST_CLANG} or newer, but `{name}` is {}: {remedy}", version.trim()));
    }
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    exit(1);
}
