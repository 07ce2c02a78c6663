// Connect runs the configurations of deploy/connectors with the engine below Redpanda Connect (Benthos), whose command
// line it has: lint, test, run. Its Kafka components are not part of that engine; stand-ins with the fields that the
// configurations use take their place: the output appends JSON lines to the file STAND_IN_OUT, the input reads them from
// STAND_IN_IN.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"os"
	"sync"

	"github.com/redpanda-data/benthos/v4/public/service"

	_ "github.com/redpanda-data/benthos/v4/public/components/io"
	_ "github.com/redpanda-data/benthos/v4/public/components/pure"
	_ "github.com/redpanda-data/benthos/v4/public/components/pure/extended"
)

type record struct {
	Topic string `json:"topic"`
	Key   string `json:"key"`
	Value string `json:"value"`
}

type output struct {
	topic, key *service.InterpolatedString
	lock       sync.Mutex
}

func (o *output) Connect(context.Context) error { return nil }
func (o *output) Close(context.Context) error   { return nil }

func (o *output) Write(_ context.Context, message *service.Message) error {
	topic, err := o.topic.TryString(message)
	if err != nil {
		return err
	}
	key, err := o.key.TryString(message)
	if err != nil {
		return err
	}
	value, err := message.AsBytes()
	if err != nil {
		return err
	}
	line, err := json.Marshal(record{topic, key, string(value)})
	if err != nil {
		return err
	}
	o.lock.Lock()
	defer o.lock.Unlock()
	file, err := os.OpenFile(os.Getenv("STAND_IN_OUT"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = file.Write(append(line, '\n'))
	return err
}

type input struct {
	lines *bufio.Scanner
	file  *os.File
}

func (i *input) Connect(context.Context) (err error) {
	i.file, err = os.Open(os.Getenv("STAND_IN_IN"))
	if err == nil {
		i.lines = bufio.NewScanner(i.file)
		i.lines.Buffer(nil, 1<<20)
	}
	return err
}

func (i *input) Read(context.Context) (*service.Message, service.AckFunc, error) {
	if !i.lines.Scan() {
		return nil, nil, service.ErrEndOfInput
	}
	message := service.NewMessage([]byte(i.lines.Text()))
	return message, func(context.Context, error) error { return nil }, nil
}

func (i *input) Close(context.Context) error {
	if i.file == nil {
		return nil
	}
	return i.file.Close()
}

func main() {
	brokers := service.NewStringListField("seed_brokers")
	register(service.RegisterOutput("redpanda",
		service.NewConfigSpec().Fields(
			brokers,
			service.NewInterpolatedStringField("topic"),
			service.NewInterpolatedStringField("key"),
		),
		func(config *service.ParsedConfig, _ *service.Resources) (service.Output, int, error) {
			topic, err := config.FieldInterpolatedString("topic")
			if err != nil {
				return nil, 0, err
			}
			key, err := config.FieldInterpolatedString("key")
			return &output{topic: topic, key: key}, 1, err
		}))
	register(service.RegisterInput("redpanda",
		service.NewConfigSpec().Fields(
			brokers,
			service.NewStringListField("topics"),
			service.NewStringField("consumer_group"),
			service.NewStringEnumField("transaction_isolation_level", "read_committed", "read_uncommitted"),
		),
		func(*service.ParsedConfig, *service.Resources) (service.Input, error) {
			return service.AutoRetryNacks(&input{}), nil
		}))
	service.RunCLI(context.Background())
}

func register(err error) {
	if err != nil {
		panic(err)
	}
}
