//! `fio`, where it is installed: another program's view of the same file.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::measure::Pass;

/// Whether `fio` can be run.
pub fn is_installed() -> bool {
    Command::new("fio")
        .arg("--version")
        .output()
        .is_ok_and(|output| output.status.success())
}

/// Overwrites `pass_bytes` of a file of `file_bytes` in random order, `io_uring` 8 deep, `O_DIRECT`.
/// None when fio fails or says something else than expected.
///
/// Only stores: fio's loads land in a few buffers that never leave the processor's cache.
pub fn store(path: &Path, file_bytes: usize, pass_bytes: usize, row_bytes: usize) -> Option<Pass> {
    let output = Command::new("fio")
        .args(["--name=reference", "--rw=randwrite", "--ioengine=io_uring"])
        .args(["--iodepth=8", "--direct=1", "--overwrite=1", "--numjobs=1"])
        .args(["--end_fsync=0", "--randrepeat=0", "--output-format=json"])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--size={file_bytes}"))
        .arg(format!("--io_size={pass_bytes}"))
        .arg(format!("--bs={row_bytes}"))
        .output()
        .ok()?;
    parse(&output.stdout)
}

/// The pass that fio's JSON tells of.
fn parse(output: &[u8]) -> Option<Pass> {
    // Warnings may come before it.
    let start = output.iter().position(|byte| *byte == b'{')?;
    let report: Value = serde_json::from_slice(output.get(start..)?).ok()?;
    let job = report.get("jobs")?.get(0)?;
    let bytes = job.get("write")?.get("io_bytes")?.as_u64()?;
    let speed = job.get("write")?.get("bw_bytes")?.as_f64()?;
    let percent = job.get("usr_cpu")?.as_f64()? + job.get("sys_cpu")?.as_f64()?;
    #[expect(
        clippy::as_conversions,
        clippy::cast_precision_loss,
        reason = "a figure with three digits"
    )]
    let wall = Duration::try_from_secs_f64(bytes as f64 / speed).ok()?;
    Some(Pass {
        bytes: usize::try_from(bytes).ok()?,
        wall,
        processor: wall.mul_f64((percent / 100.0).clamp(0.0, 1e3)),
    })
}
