#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    dwell::fuzz::kallsyms(data);
});
